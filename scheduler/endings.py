"""The log line of every job that no worker ended.

A worker logs the jobs that it finishes. All others end inside a script that the
scheduler, a client or a worker called: rejected, expired, cancelled while they waited,
given up. Each leaves an event in the stream `done`, so the active scheduler logs them
from there, however they ended, and goes on where its predecessor stopped.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Final, cast

import msgspec
import redis.asyncio
import structlog

from ..shared.job_line import JOB_EVENT, job_line
from ..shared.keys import Keys
from ..shared.messages import JobResult, Timings
from ..shared.metrics.jobs import count_end
from ..shared.script_endings import moment
from ..shared.script_runner import text

EVERY_S: Final = 1.0
"""Between two looks at the stream."""
MOST_EVENTS: Final = 512
"""Read at once."""
_CURSOR: Final = "logged"
"""Field of the scheduler's lease: the last event that was logged."""
_ENTRY_ID: Final = re.compile(rb"[0-9]{1,18}-[0-9]{1,18}")
_FIELDS: Final = (
    *("tokens", "bucket", "epoch"),
    *("enqueued_ms", "started_ms", "first_ms", "finished_ms"),
)
_log = structlog.get_logger(__name__)


class EndLog:
    """Logs ends of jobs of one shard.

    Args:
        client: Redis.
        keys: The shard's names.
    """

    def __init__(self, client: "redis.asyncio.Redis", keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._cursor: bytes | None = None

    async def run(self) -> None:
        """Logs until cancelled."""
        while True:
            if not await self.step():
                await asyncio.sleep(EVERY_S)

    async def step(self) -> bool:
        """Logs what is new; whether more is left."""
        cursor = self._cursor or await self._read_cursor()
        reply = await self._client.xread({self._keys.done: cursor}, count=MOST_EVENTS)
        rows = (
            cast("list[tuple[bytes, dict[bytes, bytes]]]", reply[0][1]) if reply else []
        )
        if not rows:
            return False
        # An event of an earlier version names no owner at all: it was logged then.
        ours = [fields for _, fields in rows if fields.get(b"owner") == b""]
        if ours:
            await self._tell(ours)
        self._cursor = rows[-1][0]
        await self._client.hset(self._keys.scheduler, _CURSOR, self._cursor)  # type: ignore[misc, arg-type]
        return len(rows) == MOST_EVENTS

    async def _read_cursor(self) -> bytes:
        reply = await self._client.hget(self._keys.scheduler, _CURSOR)  # type: ignore[misc]
        found = cast("bytes | None", reply) or b""
        self._cursor = found if _ENTRY_ID.fullmatch(found) else b"0-0"
        return self._cursor

    async def _tell(self, events: Sequence[Mapping[bytes, bytes]]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for fields in events:
            job_id = text(fields.get(b"id"))
            pipe.hmget(self._keys.job(job_id), list(_FIELDS))
            pipe.get(self._keys.output(job_id))
        replies = await pipe.execute(raise_on_error=False)
        pairs = zip(replies[::2], replies[1::2], strict=True)
        for fields, (record, output) in zip(events, pairs, strict=True):
            try:
                self._tell_of(fields, record, output)
            except Exception:  # noqa: BLE001 - no record may stop the others
                _log.exception("job_not_described", job=text(fields.get(b"id")))

    def _tell_of(
        self, event: Mapping[bytes, bytes], record: object, output: object
    ) -> None:
        values = [text(v) for v in record] if isinstance(record, list) else []
        tokens, bucket, epoch, *times = values or [""] * len(_FIELDS)
        result = JobResult(
            id=text(event.get(b"id")),
            state=text(event.get(b"state")),
            model=self._keys.model,
        )
        if isinstance(output, bytes):
            result = msgspec.json.decode(output, type=JobResult)
        result = msgspec.structs.replace(result, timings=_timings(times))
        job_class, prompt_tokens = text(event.get(b"class")), moment(tokens) or 0
        tenant = text(event.get(b"tenant"))
        line = job_line(
            result,
            job_class=job_class,
            tenant=tenant,
            bucket=bucket,
            prompt_tokens=prompt_tokens,
            epoch=moment(epoch) or 0,
        )
        _log.info(JOB_EVENT, **line)
        count_end(result, job_class, tenant, prompt_tokens)


def _timings(times: Sequence[str]) -> Timings:
    """Milliseconds since enqueue, from the times of the record itself."""
    enqueued, *later = (moment(value) for value in times)
    if enqueued is None:
        return Timings()
    since = [None if at is None else float(at - enqueued) for at in later]
    return Timings(queued_ms=since[0], ttft_ms=since[1], total_ms=since[2])
