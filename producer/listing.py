"""The newest jobs of a pool, over all its shards."""

from typing import Final

from ..shared.keys import SHARDS, Keys
from .info import JobInfo
from .session import Session

_PAGE: Final = 500
"""Records per round trip."""


async def recent_jobs(session: Session, limit: int, state: str | None) -> list[JobInfo]:
    """Returns jobs by time of enqueue, newest first.

    Args:
        session: The client's connections.
        limit: Most jobs to return.
        state: Only jobs in this `State`; None takes all.
    """
    # A filter may have to look at everything that the index remembers.
    ids = await _recent_ids(session, limit if state is None else None)
    found: list[JobInfo] = []
    for start in range(0, len(ids), _PAGE):
        page = await _records(session, ids[start : start + _PAGE])
        found += [info for info in page if state in (None, info.state)]
        if len(found) >= limit:
            break
    return found[:limit]


async def _recent_ids(session: Session, limit: int | None) -> list[tuple[str, Keys]]:
    (shards,) = await session.read(("SMEMBERS", SHARDS))
    recent: list[tuple[float, str, Keys]] = []
    for shard in sorted(shards):
        keys = Keys.of_shard(shard.decode())
        last = -1 if limit is None else limit - 1
        newest: list[tuple[bytes, float]] = await session.patiently(
            lambda: session.redis.zrevrange(
                keys.recent,  # noqa: B023
                0,
                last,  # noqa: B023
                withscores=True,
            )
        )
        recent += [(at, job_id.decode(), keys) for job_id, at in newest]
    recent.sort(key=lambda entry: entry[:2], reverse=True)
    return [(job_id, keys) for _, job_id, keys in recent[:limit]]


async def _records(session: Session, ids: list[tuple[str, Keys]]) -> list[JobInfo]:
    records: list[dict[bytes, bytes]] = await session.read(
        *(("HGETALL", keys.job(job_id)) for job_id, keys in ids)
    )
    return [
        JobInfo.from_record(
            job_id, {k.decode(): v.decode(errors="replace") for k, v in record.items()}
        )
        for (job_id, _), record in zip(ids, records, strict=True)
        if record  # else its retention has passed since
    ]
