"""Putting a run's jobs into the queue: a full queue pauses a run and loses nothing."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec
import structlog

from ...shared.bulk.writes import RunWrites
from ...shared.errors import StorageUnavailable
from ...shared.keys import Keys
from ...shared.messages import JobError
from ...shared.script_types import EnqueueReply, NewJob
from .pool import BulkPool

STORE_RETRY_S: Final = 2.0
"""A store that is away is tried again after this long."""
_log = structlog.get_logger(__name__)


class Sent(msgspec.Struct, frozen=True):
    """What became of jobs that were to be enqueued."""

    retry_after_s: float | None
    """Set when some found no room; they stay unsent."""
    refused: dict[str, JobError]
    """Job id -> why it can never be enqueued."""
    moved: int = 0
    """Items that were moved on, for calls that open jobs."""


async def send(pool: BulkPool, writes: RunWrites, jobs: Sequence[NewJob]) -> Sent:
    """Enqueues jobs that are open in their run. Safe to repeat.

    Args:
        pool: The process's view of the pool.
        writes: Of the run.
        jobs: Of any shards.
    """
    try:
        await pool.upload(jobs)
    except StorageUnavailable as error:
        _log.warning("store_away", run=writes.keys.run, error=str(error))
        return Sent(STORE_RETRY_S, {})
    shards: defaultdict[str, list[NewJob]] = defaultdict(list)
    for job in jobs:
        shards[job.id.keys.shard].append(job)
    waits: list[float] = []
    refused: dict[str, JobError] = {}
    for shard, members in shards.items():
        scripts = pool.scripts(Keys.of_shard(shard))
        replies = await scripts.enqueue(members)
        await _note(writes, members, replies, waits, refused)
    return Sent(max(waits, default=None), refused)


async def _note(
    writes: RunWrites,
    jobs: Sequence[NewJob],
    replies: Sequence[EnqueueReply],
    waits: list[float],
    refused: dict[str, JobError],
) -> None:
    sent: list[str] = []
    known: list[str] = []
    for job, reply in zip(jobs, replies, strict=True):
        job_id = str(job.id)
        if reply.status == "full":
            waits.append(reply.retry_after_s or 1.0)
        elif reply.status in ("invalid", "late"):
            field, _, problem = reply.detail.partition(": ")
            refused[job_id] = JobError("invalid_request", problem or field, field)
        else:
            # A conflict is a job of ours as well: its id names this very place. An
            # earlier version of this code may have worded its request otherwise.
            sent.append(job_id)
            known += [] if reply.status == "queued" else [job_id]
    await writes.sent(sent)
    if known:
        # One that was there before may have ended before anybody listened.
        await writes.mark_ended(known)
