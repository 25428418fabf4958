"""Comparing a copy with the job that it was made from."""

from itertools import takewhile
from typing import Final

import msgspec
import redis.asyncio
import structlog

from ..shared.keys import Keys
from ..shared.messages import Choice, JobResult, Timings, encode
from ..shared.script_runner import text
from ..shared.shadow_keys import samples_key, shadow_key, source_key
from ..shared.shadow_report import KEEP_S, MOST_SAMPLES, ShadowSample
from .events import DoneEvent

_ERROR_LENGTH: Final = 200
_log = structlog.get_logger(__name__)


async def compare(client: "redis.asyncio.Redis", keys: Keys, event: DoneEvent) -> None:
    """Notes how a copy that has ended compares; once, however often it is called.

    Args:
        client: Redis; replies are bytes.
        keys: Names of the shard of both.
        event: The copy's end.
    """
    key = source_key(event.id)
    source = text(await client.get(key))
    if not source or not await client.delete(key):
        return  # compared before, or by another janitor
    pipe = client.pipeline(transaction=False)
    pipe.get(keys.output(source))
    pipe.get(keys.output(event.id))
    pipe.hget(keys.job(event.id), "version")
    original, copied, version = await pipe.execute(raise_on_error=False)
    name = text(version) if isinstance(version, bytes) else ""
    before, after = _result(original), _result(copied)
    pipe = client.pipeline(transaction=False)
    record = shadow_key(keys.model, name)
    if after is None or event.state != "succeeded":
        pipe.hincrby(record, "failed", 1)
        pipe.hset(record, "last_error", _error(event, after))
    elif before is not None:
        samples = samples_key(keys.model, name)
        pipe.hincrby(record, "compared", 1)
        pipe.lpush(samples, encode(sample_of(before, after)))
        pipe.ltrim(samples, 0, MOST_SAMPLES - 1)
        pipe.expire(samples, KEEP_S)
    pipe.expire(record, KEEP_S)
    await pipe.execute()


def _result(raw: object) -> JobResult | None:
    if not isinstance(raw, bytes):
        return None
    try:
        return msgspec.json.decode(raw, type=JobResult)
    except msgspec.MsgspecError:
        _log.warning("shadow_result_unreadable")
        return None


def _error(event: DoneEvent, result: JobResult | None) -> str:
    error = result.error if result else None
    said = f"{event.id} {event.state}"
    return f"{said}: {error.message}"[:_ERROR_LENGTH] if error else said


def sample_of(before: JobResult, after: JobResult) -> ShadowSample:
    """Compares two results of one request.

    Args:
        before: Of the version that serves.
        after: Of its copy.
    """
    pairs = [
        (choice.token_ids, _choice(after, choice.index)) for choice in before.choices
    ]
    exact = len(before.choices) == len(after.choices) and all(
        one == other for one, other in pairs
    )
    parts = [_common(one, other) for one, other in pairs]
    return ShadowSample(
        exact=exact,
        prefix=round(sum(parts) / len(parts), 6) if parts else 1.0,
        ttft_ms=(_since_start(before.timings)[0], _since_start(after.timings)[0]),
        total_ms=(_since_start(before.timings)[1], _since_start(after.timings)[1]),
    )


def _choice(result: JobResult, index: int) -> tuple[int, ...]:
    found: list[Choice] = [one for one in result.choices if one.index == index]
    return found[0].token_ids if found else ()


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """The part of the longer one that both begin with."""
    longest = max(len(one), len(other))
    if not longest:
        return 1.0
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same) / longest


def _since_start(timings: Timings) -> tuple[float | None, float | None]:
    """First token and end, from the start on a worker: queues differ by design."""
    start = timings.queued_ms
    if start is None:
        return None, None
    first, total = timings.ttft_ms, timings.total_ms
    return (
        None if first is None else max(first - start, 0.0),
        None if total is None else max(total - start, 0.0),
    )
