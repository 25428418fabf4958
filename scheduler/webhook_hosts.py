"""Deliveries that are due and whose host has no place: put off before they are begun.

A task of arq takes some ten round trips. Where a thousand deliveries to a host that
hangs are due, one to another host would stand behind as many tasks that only find out
that it is not their turn. Here they are told so together, in two round trips.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Final, cast

import redis.asyncio
from arq.constants import in_progress_key_prefix

from ..shared.clock import redis_ms
from ..shared.errors import UnknownJob
from ..shared.keys import JobId
from ..shared.script_runner import text
from ..shared.webhook_keys import QUEUE, delivery_key
from ..shared.webhook_target import shown_target
from .arq_running import QuietWorker
from .webhook_turns import Turns
from .webhooks import event_of

MOST_KNOWN: Final = 10_000
"""Deliveries whose host is remembered."""
MOST_BEGUN: Final = 32
"""Deliveries to one host begun at a look, four times a second: by the next it is known
whether the host hangs."""
SHARED: Final = 0.75
"""Part of the places that a host may have more than one of."""
CROWDED_S: Final = 1.0
"""What finds no other is due again after this long: meanwhile it hides nothing."""


class Hosts:
    """Which host each delivery goes to. That never changes, so it is read once.

    Args:
        client: Redis.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client
        self._known: dict[str, str] = {}

    async def of(self, event_ids: Sequence[str]) -> list[str]:
        """Returns the host of each delivery, as `shown_target` names it."""
        unknown = [one for one in event_ids if one not in self._known]
        found = dict(zip(unknown, await self._read(unknown), strict=True))
        names = [found.get(one) or self._known[one] for one in event_ids]
        self._known |= found
        for old in list(islice(self._known, max(len(self._known) - MOST_KNOWN, 0))):
            del self._known[old]
        return names

    async def _read(self, event_ids: Sequence[str]) -> list[str]:
        """Of a job that ended the record of its delivery may still be to be made."""
        if not event_ids:
            return []
        pipe = self._client.pipeline(transaction=False)
        for event_id in event_ids:
            key = delivery_key(event_id)
            pipe.hget(key, "url")
            pipe.hget(_job_key(event_id) or key, "webhook")
        replies = await pipe.execute(raise_on_error=False)
        urls = [
            next((text(one) for one in pair if isinstance(one, bytes)), "")
            for pair in zip(replies[::2], replies[1::2], strict=True)
        ]
        return [shown_target(url) for url in urls]


class TurnsWorker(QuietWorker):
    """An arq worker of deliveries that begins those whose turn it may be.

    `turns` and `hosts` are set before it runs.
    """

    turns: Turns
    hosts: Hosts

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Begins what is due, but for hosts that have no place now."""
        names = [one.decode() for one in job_ids if one.decode() not in self.tasks]
        hosts = await self.hosts.of([event_of(name) for name in names])
        begun: Counter[str] = Counter()
        ready: list[bytes] = []
        waits: dict[str, float] = {}
        for name, host in zip(names, hosts, strict=True):
            wait_s = self.turns.wait_s(host)
            if wait_s is None and self._is_crowded_by(host, begun):
                wait_s = CROWDED_S
            if wait_s is not None:
                waits[name] = wait_s
            elif begun[host] < MOST_BEGUN:
                begun[host] += 1
                ready.append(name.encode())
        await self._put_off(waits)
        await super().start_jobs(ready)

    def _is_crowded_by(self, host: str, begun: Counter[str]) -> bool:
        """Whether there are few places left, and a host has one already.

        The last places are for hosts that have none: a few that hang fill the others.
        """
        taken = self.job_counter + begun.total()
        has_any = bool(begun[host]) or self.turns.has_any(host)
        return has_any and taken >= self.max_jobs * SHARED

    async def _put_off(self, waits: dict[str, float]) -> None:
        """Makes deliveries due later, but for those that another janitor makes now."""
        if not waits:
            return
        now_ms = await redis_ms(self.pool)
        pipe = self.pool.pipeline(transaction=False)
        for name in waits:
            pipe.exists(in_progress_key_prefix + name)
        running = cast("list[int]", await pipe.execute())
        later = {
            name: now_ms + round(wait_s * 1000)
            for (name, wait_s), is_running in zip(waits.items(), running, strict=True)
            if not is_running
        }
        if later:
            await self.pool.zadd(QUEUE, later, xx=True, gt=True)


def _job_key(event_id: str) -> str | None:
    try:
        return JobId.parse(event_id).keys.job(event_id)
    except UnknownJob:
        return None
