"""Deliveries of webhooks in Redis: one hash each, and what is still to be done."""

from collections.abc import Mapping
from typing import Final, cast

import redis.asyncio
import structlog

from ..shared.clock import redis_ms
from ..shared.errors import UnknownJob
from ..shared.keys import JobId
from ..shared.script_runner import text
from ..shared.webhook_keys import LOG, OPEN, delivery_key
from .webhook_events import JobEnd, job_end

KEEP_MS: Final = 7 * 86_400_000
"""A record stays this long after its last change."""
MOST_LOGGED: Final = 10_000
"""Deliveries that are listed."""
SETTLED: Final = frozenset({"delivered", "given_up"})
_log = structlog.get_logger(__name__)

Record = dict[str, str]


class Records:
    """The records of all deliveries.

    Args:
        client: Redis.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client

    async def read(self, event_id: str) -> Record | None:
        """Returns the record of a delivery; of a job that has ended, makes it.

        Returns:
            None where there is nothing to deliver: not yet of a job that goes on, and
            never of what is forgotten here.
        """
        row = await cast(
            "object",
            self._client.hgetall(delivery_key(event_id)),  # type: ignore[misc]
        )
        fields = cast("dict[bytes, bytes]", row)
        record = {text(name): text(value) for name, value in fields.items()}
        return record if "data" in record else await self._begun(event_id)

    async def _begun(self, event_id: str) -> Record | None:
        end = await job_end(self._client, event_id)
        if isinstance(end, JobEnd):
            fields = {"url": end.url, "type": end.type, "data": end.data.decode()}
            fields |= {"tenant": end.tenant, "at_ms": str(end.at_ms)}
            return await self._opened(event_id, fields)
        if end == "none":
            if await self._is_expected(event_id):
                _log.error(
                    "webhook_lost",
                    job=event_id,
                    cure="its record had expired before the janitor saw its end: keep "
                    "one running, or raise retention.result_s",
                )
            await self.settle(event_id)
        return None

    async def _is_expected(self, job_id: str) -> bool:
        try:
            key = JobId.parse(job_id).keys.webhooks
        except UnknownJob:
            return False
        return await self._client.zscore(key, job_id) is not None

    async def open(self, events: Mapping[str, Mapping[str, str]]) -> None:
        """Writes the records of what was announced, of those that have none.

        Args:
            events: Id of an event -> `url`, `type`, `data` and `tenant`.
        """
        pipe = self._client.pipeline(transaction=False)
        for event_id in events:
            pipe.exists(delivery_key(event_id))
        known = await pipe.execute()
        new = [one for one, there in zip(events, known, strict=True) if not there]
        if new:
            at_ms = await redis_ms(self._client)
            pipe = self._client.pipeline(transaction=True)
            for event_id in new:
                _write(pipe, event_id, _begun(events[event_id], at_ms), at_ms, at_ms)
            await pipe.execute()

    async def _opened(self, event_id: str, fields: Mapping[str, str]) -> Record:
        at_ms = await redis_ms(self._client)
        record = _begun(fields, at_ms)
        pipe = self._client.pipeline(transaction=True)
        _write(pipe, event_id, record, at_ms, at_ms)
        await pipe.execute()
        return record

    async def open_again(self, event_id: str) -> None:
        """Makes a settled delivery pending."""
        if await self._client.exists(delivery_key(event_id)):
            await self.write(event_id, {"state": "pending", "attempts": "0"}, 0.0)

    async def count_attempt(self, event_id: str, made: int) -> None:
        """Notes that an attempt is about to be made."""
        await cast(
            "object",
            self._client.hset(delivery_key(event_id), "attempts", str(made)),  # type: ignore[misc]
        )

    async def write(
        self, event_id: str, fields: Mapping[str, str], wait_s: float | None
    ) -> None:
        """Changes a record.

        Args:
            event_id: Of the event.
            fields: What changes.
            wait_s: Until the next attempt; None: it is settled.
        """
        at_ms = await redis_ms(self._client)
        next_ms = None if wait_s is None else at_ms + round(wait_s * 1000)
        pipe = self._client.pipeline(transaction=True)
        _write(pipe, event_id, fields, at_ms, next_ms)
        await pipe.execute()
        if next_ms is None:
            await self.settle(event_id)

    async def settle(self, event_id: str) -> None:
        """Forgets that something is still to be delivered."""
        await self._client.zrem(OPEN, event_id)
        try:
            key = JobId.parse(event_id).keys.webhooks
        except UnknownJob:
            return  # of a run or a batch
        await self._client.zrem(key, event_id)


def _begun(fields: Mapping[str, str], at_ms: int) -> Record:
    """The record of a delivery before its first attempt."""
    begun = {"at_ms": str(at_ms), "created_ms": str(at_ms)}
    return {**begun, **fields, "state": "pending"}


def _write(
    pipe: "redis.asyncio.client.Pipeline",
    event_id: str,
    fields: Mapping[str, str],
    at_ms: int,
    next_ms: int | None,
) -> None:
    """Adds the change of a record to a pipeline.

    Args:
        pipe: Of one transaction.
        event_id: Of the event.
        fields: What changes.
        at_ms: The time of Redis.
        next_ms: Of the next attempt; None: it is settled.
    """
    key = delivery_key(event_id)
    moments = {"changed_ms": str(at_ms), "next_ms": str(next_ms or "")}
    pipe.hset(key, mapping={**fields, **moments})
    pipe.pexpire(key, KEEP_MS)
    pipe.zadd(LOG, {event_id: at_ms})
    pipe.zremrangebyrank(LOG, 0, -MOST_LOGGED - 1)
    if next_ms is not None:
        pipe.zadd(OPEN, {event_id: next_ms})
