"""Deliveries that are due and whose host has no place: put off before they are begun.

A task of arq takes some ten round trips. Where a thousand deliveries to a host that
hangs are due, one to another host would stand behind as many tasks that only find out
that it is not their turn. Here they are told so together, in two round trips.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple, cast

import redis.asyncio
from arq.constants import in_progress_key_prefix

from ..shared.clock import redis_ms
from ..shared.errors import UnknownJob
from ..shared.keys import JobId
from ..shared.script_runner import text
from ..shared.webhook_keys import QUEUE, delivery_key
from ..shared.webhook_target import shown_target
from .arq_running import QuietWorker
from .webhook_turns import Turns, has_share
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


class Receiver(NamedTuple):
    """Where a delivery goes, and for whom."""

    host: str
    """As `shown_target` names it."""
    tenant: str
    """Empty where it is not known."""


class Hosts:
    """Where each delivery goes. That never changes, so it is read once.

    Args:
        client: Redis.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client
        self._known: dict[str, Receiver] = {}

    async def of(self, event_ids: Sequence[str]) -> list[Receiver]:
        """Returns the receiver of each delivery."""
        unknown = [one for one in event_ids if one not in self._known]
        found = dict(zip(unknown, await self._read(unknown), strict=True))
        receivers = [found.get(one) or self._known[one] for one in event_ids]
        self._known |= found
        for old in list(islice(self._known, max(len(self._known) - MOST_KNOWN, 0))):
            del self._known[old]
        return receivers

    async def _read(self, event_ids: Sequence[str]) -> list[Receiver]:
        """Of a job that ended the record of its delivery may still be to be made."""
        if not event_ids:
            return []
        pipe = self._client.pipeline(transaction=False)
        for event_id in event_ids:
            key = delivery_key(event_id)
            pipe.hmget(key, ["url", "tenant"])
            pipe.hmget(_job_key(event_id) or key, ["webhook", "tenant"])
        replies = await pipe.execute(raise_on_error=False)
        return [
            next((_receiver(row) for row in pair if _has_url(row)), Receiver("", ""))
            for pair in zip(replies[::2], replies[1::2], strict=True)
        ]


class _Look:
    """What may begin at one look.

    Args:
        turns: Places of hosts.
        most: Places of all.
        running: Tenant -> deliveries that run.
        taken: Places that are taken.
    """

    def __init__(
        self, turns: Turns, most: int, running: Counter[str], taken: int
    ) -> None:
        self._turns = turns
        self._most = most
        self._running = running
        self._taken = taken
        self._of_host: Counter[str] = Counter()
        self._of_tenant: Counter[str] = Counter()

    def wait_s(self, to: Receiver) -> float | None:
        """Returns for how long a delivery is put off; None: not at all."""
        wait_s = self._turns.wait_s(to.host)
        if wait_s is None and self._is_crowded_by(to):
            wait_s = CROWDED_S
        return wait_s

    def begins(self, to: Receiver) -> bool:
        """Counts a delivery as begun, unless a look has begun enough like it.

        What is not begun stays due: by the next look it is known how long those take.
        """
        held = self._running[to.tenant] + self._of_tenant[to.tenant]
        free = self._most - self._taken - self._of_host.total()
        if self._of_host[to.host] >= MOST_BEGUN or not self._has_share(to, held, free):
            return False
        self._of_host[to.host] += 1
        self._of_tenant[to.tenant] += 1
        return True

    def _is_crowded_by(self, to: Receiver) -> bool:
        """Whether few places are left, and its host or its tenant has enough of them.

        The last places are for hosts that have none: a few that hang fill the others.
        """
        taken = self._taken + self._of_host.total()
        if self._has_any(to) and taken >= self._most * SHARED:
            return True
        free = self._most - self._taken
        return not self._has_share(to, self._running[to.tenant], free)

    def _has_any(self, to: Receiver) -> bool:
        return bool(self._of_host[to.host]) or self._turns.has_any(to.host)

    def _has_share(self, to: Receiver, held: int, free: int) -> bool:
        return not to.tenant or has_share(held, free, is_new=not self._has_any(to))


class TurnsWorker(QuietWorker):
    """An arq worker of deliveries that begins those whose turn it may be.

    `turns` and `hosts` are set before it runs.
    """

    turns: Turns
    hosts: Hosts

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Begins what is due, but for hosts and tenants that have no place now."""
        running = [name for name, task in self.tasks.items() if not task.done()]
        names = [one.decode() for one in job_ids if one.decode() not in self.tasks]
        found = await self.hosts.of([event_of(name) for name in (*running, *names)])
        held = Counter(receiver.tenant for receiver in found[: len(running)])
        look = _Look(self.turns, self.max_jobs, held, self.job_counter)
        ready: list[bytes] = []
        waits: dict[str, float] = {}
        for name, receiver in zip(names, found[len(running) :], strict=True):
            wait_s = look.wait_s(receiver)
            if wait_s is not None:
                waits[name] = wait_s
            elif look.begins(receiver):
                ready.append(name.encode())
        await self._put_off(waits)
        await super().start_jobs(ready)

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


def _has_url(row: object) -> bool:
    return isinstance(row, list) and isinstance(row[0], bytes)


def _receiver(row: Sequence[bytes | None]) -> Receiver:
    return Receiver(shown_target(text(row[0])), text(row[1]))
