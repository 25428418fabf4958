"""The newest jobs of a pool, over all its shards."""

import logging
from typing import Final

from ..shared.errors import ProtocolError, UnknownJob
from ..shared.keys import SHARDS, JobId, Keys
from .info import JobInfo
from .session import Session

_PAGE: Final = 500
"""Records per round trip."""
_log: Final = logging.getLogger("tokenmill.producer")


async def recent_jobs(
    session: Session,
    limit: int,
    state: str | None,
    *,
    tenant: str | None = None,
    contains: str = "",
) -> list[JobInfo]:
    """Returns jobs by time of enqueue, newest first.

    A record that is not in our format spoils no other: it is listed as `UNREADABLE`
    with the `problem`.

    Args:
        session: The client's connections.
        limit: Most jobs to return.
        state: Only jobs in this `State`; None takes all.
        tenant: Only jobs of this tenant; None takes all.
        contains: Only jobs whose id contains this.
    """
    # A filter may have to look at everything that the index remembers.
    is_filtered = state is not None or tenant is not None or contains
    ids = await _recent_ids(session, None if is_filtered else limit)
    found = await _matching(session, ids, limit, state, tenant, contains)
    if len(found) < limit and not is_filtered and len(ids) == limit:
        # The index remembers jobs longer than their records live: a bulk run's go
        # once it has their results. What exists lies behind them.
        ids = (await _recent_ids(session, None))[limit:]
        found += await _matching(session, ids, limit - len(found), None, None, "")
    return found


async def _matching(
    session: Session,
    ids: list[tuple[str, Keys]],
    limit: int,
    state: str | None,
    tenant: str | None,
    contains: str,
) -> list[JobInfo]:
    ids = [one for one in ids if contains in one[0]]
    found: list[JobInfo] = []
    for start in range(0, len(ids), _PAGE):
        page = await _records(session, ids[start : start + _PAGE])
        found += [
            info
            for info in page
            if state in (None, info.state) and tenant in (None, info.tenant)
        ]
        if len(found) >= limit:
            break
    return found[:limit]


async def _recent_ids(session: Session, limit: int | None) -> list[tuple[str, Keys]]:
    (shards,) = await session.read(("SMEMBERS", SHARDS))
    last = -1 if limit is None else limit - 1
    recent: list[tuple[float, str, Keys]] = []
    for shard in sorted(shards):
        try:
            keys = Keys.of_shard(shard.decode())
        except ValueError:
            _log.warning("%s has %r, which is no shard; left out", SHARDS, shard)
            continue
        try:
            (flat,) = await session.read(
                ("ZREVRANGE", keys.recent, 0, last, "WITHSCORES")
            )
        except ProtocolError as error:
            _log.warning("shard %s is left out: %s", keys.shard, error)
            continue
        recent += [
            (float(at), job_id.decode(errors="backslashreplace"), keys)
            for job_id, at in zip(flat[::2], flat[1::2], strict=True)
        ]
    recent.sort(key=lambda entry: entry[:2], reverse=True)
    return [(job_id, keys) for _, job_id, keys in recent[:limit]]


async def _records(session: Session, ids: list[tuple[str, Keys]]) -> list[JobInfo]:
    records = await session.read_each(
        *(("HGETALL", keys.job(job_id)) for job_id, keys in ids)
    )
    infos = (
        _info(job_id, record) for (job_id, _), record in zip(ids, records, strict=True)
    )
    return [info for info in infos if info is not None]


def _info(job_id: str, record: dict[bytes, bytes] | ProtocolError) -> JobInfo | None:
    """A row for one record; None when its retention has passed since."""
    try:
        if isinstance(record, ProtocolError):
            raise record
        JobId.parse(job_id)
        return JobInfo.from_record(job_id, as_text(record)) if record else None
    except (ProtocolError, UnknownJob) as error:
        return JobInfo.unreadable(job_id, str(error))


def as_text(record: dict[bytes, bytes]) -> dict[str, str]:
    """Returns a hash as text, whatever bytes it has."""
    return {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in record.items()
    }
