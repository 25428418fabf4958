"""Webhooks in the janitor: what is to be told goes to an arq queue of its own.

Its own, since a receiver that hangs must not hold up housekeeping, and since arq takes
up what a killed process left only after the longest task of its queue. A delivery has
the fixed arq id `webhook:<event id>`, so that it is queued once however often it is
noticed: by the event of a job's end, by an announcement, by the sweep that is the truth
where events were missed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec
import redis.asyncio
import structlog
from arq.constants import job_key_prefix
from arq.jobs import serialize_job

from ..shared.clock import redis_ms
from ..shared.keys import Keys
from ..shared.lifecycle import TERMINAL
from ..shared.script_runner import text
from ..shared.webhook_keys import ANNOUNCED, OPEN, QUEUE
from .arq_running import wake
from .events import DoneEvent
from .housekeeping import shards
from .webhook_records import KEEP_MS, Records

TASK: Final = "deliver_webhook"
"""Name of arq's task that makes one attempt."""
COUNT: Final = 200
"""Announcements, or jobs of the sweep, looked at together."""
OVERDUE_MS: Final = 30_000
"""The sweep looks at what should have been delivered for this long."""
_TASK_ID: Final = "webhook:"
_log = structlog.get_logger(__name__)


class Webhooks:
    """Queues deliveries.

    Args:
        client: Redis.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client
        self._records = Records(client)

    async def on_done(self, _keys: Keys, events: Sequence[DoneEvent]) -> None:
        """Handles terminal events of a shard: a handler of `events.DoneReader`."""
        await self.queue([event.id for event in events if event.has_webhook])

    async def queue(self, event_ids: Sequence[str]) -> None:
        """Queues deliveries that are not queued."""
        for start in range(0, len(event_ids), COUNT):
            await self._queue(event_ids[start : start + COUNT])
        if event_ids:
            wake(QUEUE)

    async def _queue(self, event_ids: Sequence[str]) -> None:
        """As arq's `enqueue_job` does it, which takes four round trips for each."""
        at_ms = await redis_ms(self._client)
        pipe = self._client.pipeline(transaction=True)
        for event_id in event_ids:
            task = serialize_job(
                TASK, (event_id,), {}, None, at_ms, serializer=msgspec.msgpack.encode
            )
            key = job_key_prefix + task_id(event_id)
            pipe.set(key, task, nx=True, px=KEEP_MS)
        pipe.zadd(QUEUE, {task_id(one): at_ms for one in event_ids}, nx=True)
        await pipe.execute()

    async def _make_due(self, event_ids: Sequence[str]) -> None:
        """Moves deliveries that wait in the queue for a later attempt to now."""
        if event_ids:
            at_ms = await redis_ms(self._client)
            due = {task_id(event_id): at_ms for event_id in event_ids}
            await self._client.zadd(QUEUE, due, xx=True, lt=True)
            wake(QUEUE)

    async def _queue_missing(self, event_ids: Sequence[str]) -> None:
        """Queues what the queue lacks, which is little or nothing."""
        if not event_ids:
            return
        names = [task_id(event_id) for event_id in event_ids]
        queued = await self._client.zmscore(QUEUE, names)
        await self.queue(
            [one for one, due in zip(event_ids, queued, strict=True) if due is None]
        )

    async def take_announced(self, block_ms: int | None = None) -> int:
        """Takes what was announced; how much there was.

        An entry is removed once its delivery is queued.

        Args:
            block_ms: How long to wait for the first; None does not wait.
        """
        reply = await self._client.xread({ANNOUNCED: "0"}, COUNT, block_ms)
        rows = cast(
            "list[tuple[bytes, dict[bytes, bytes]]]", reply[0][1] if reply else []
        )
        if rows:
            await self._take(rows)
        return len(rows)

    async def _take(self, rows: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> None:
        """Takes some together; what is said of one event, in its order."""
        by_id: dict[str, list[dict[str, str]]] = {}
        for entry, fields in rows:
            named = {text(name): text(value) for name, value in fields.items()}
            event_id = named.get("id", "")
            is_whole = "again" in named or {"url", "type", "data"} <= named.keys()
            if event_id and is_whole:
                by_id.setdefault(event_id, []).append(named)
            else:
                _log.error("webhook_not_understood", entry=text(entry))
        await self._open(by_id)
        await self.queue(list(by_id))
        again = [one for one, told in by_id.items() if any("again" in t for t in told)]
        await self._make_due(again)
        await self._client.xdel(ANNOUNCED, *(entry for entry, _ in rows))

    async def _open(self, by_id: Mapping[str, Sequence[dict[str, str]]]) -> None:
        """Writes the records of what is new; the first word of an event holds."""
        new: dict[str, dict[str, str]] = {}
        for event_id, told in by_id.items():
            first = next((named for named in told if "again" not in named), None)
            if first is not None:
                record = {name: first[name] for name in ("url", "type", "data")}
                new[event_id] = {**record, "tenant": _tenant(first["data"])}
        await self._records.open(new)
        for event_id, told in by_id.items():
            if any("again" in named for named in told):
                await self._records.open_again(event_id)

    async def sweep(self) -> int:
        """Queues what should be delivered and is not queued; how much that may be."""
        late_ms = await redis_ms(self._client) - OVERDUE_MS
        found = 0
        for keys in await shards(self._client):
            found += await self._sweep_jobs(keys, late_ms)
        return found + await self._sweep_open(late_ms)

    async def _sweep_open(self, late_ms: int) -> int:
        """Deliveries whose next attempt is overdue."""
        found = 0
        while True:
            names = await self._client.zrangebyscore(
                OPEN, "-inf", late_ms, found, COUNT
            )
            await self._queue_missing([text(name) for name in names])
            found += len(names)
            if len(names) < COUNT:
                return found

    async def _sweep_jobs(self, keys: Keys, late_ms: int) -> int:
        """Jobs of a shard that have ended, and whose event nobody acted on."""
        found, start = 0, 0
        while True:
            names = await self._client.zrangebyscore(
                keys.webhooks, "-inf", late_ms, start, COUNT
            )
            job_ids = [text(name) for name in names]
            pipe = self._client.pipeline(transaction=False)
            for job_id in job_ids:
                pipe.hget(keys.job(job_id), "state")
            states = await pipe.execute(raise_on_error=False) if job_ids else []
            # Also those without a record: that is said once, and they are let go.
            ended = [
                job_id
                for job_id, state in zip(job_ids, states, strict=True)
                if state is None or text(state) in TERMINAL
            ]
            await self._queue_missing(ended)
            found += len(ended)
            if len(job_ids) < COUNT:
                return found
            start += COUNT


def task_id(event_id: str) -> str:
    """The id of the arq task that delivers an event: one, however often it is asked."""
    return f"{_TASK_ID}{event_id}"


def event_of(name: str) -> str:
    """The event that an arq task delivers, by the task's id."""
    return name.removeprefix(_TASK_ID)


def _tenant(data: str) -> str:
    try:
        tenant = msgspec.json.decode(data, type=dict[str, Any]).get("tenant")
    except msgspec.MsgspecError:
        return ""
    return tenant if isinstance(tenant, str) else ""
