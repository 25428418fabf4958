"""Putting prepared jobs into the queue: in batches, again after a lost reply."""

import asyncio
import random
from collections.abc import Sequence
from typing import Final, Literal

from ..shared.errors import (
    IdempotencyConflict,
    InvalidRequest,
    QueueFull,
    TokenmillError,
)
from ..shared.keys import JobId
from ..shared.messages import PoolCard
from ..shared.script_types import EnqueueReply, Limits, NewJob
from .job import Job
from .session import Session

WhenFull = Literal["raise", "wait"]
WhenUnserved = Literal["refuse", "wait"]

_BATCH_JOBS: Final = 200
"""Jobs per call of the script: it blocks Redis for a few milliseconds at most."""
_BATCH_BYTES: Final = 1024 * 1024
"""Payload per call, for the same reason."""

_LONGEST_RETRY_S: Final = 1.0
"""An ask costs little, and room may come long before the estimate says."""


class Submission:
    """Jobs on their way into the queue, and what became of them.

    Args:
        session: The client's connections.
        pool: Settings with the queue's limits.
        when_full: `wait` retries what found the queue full, `raise` does not.
    """

    def __init__(self, session: Session, pool: PoolCard, when_full: WhenFull) -> None:
        self._session = session
        self._limits = Limits(
            max_waiting_jobs=pool.max_waiting_jobs,
            max_waiting_tokens=pool.max_waiting_tokens,
            tenant_waiting_jobs=pool.tenant_waiting_jobs,
        )
        self._when_full = when_full
        self._handles: dict[str, Job] = {}

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Job]:
        """Enqueues jobs.

        Args:
            jobs: Of any shards.

        Returns:
            A handle for each, in the same order.

        Raises:
            QueueFull: A limit was reached and `when_full` is `raise`.
            IdempotencyConflict: A key was used before with another payload.
            RedisUnavailable: Redis did not answer for longer than the patience.
        """
        try:
            for batch in _batches(jobs):
                await self._enqueue_batch(batch)
        except TokenmillError as error:
            error.enqueued = tuple(h.id for h in self._handles.values())
            raise
        return [self._handles[job.id.unique] for job in jobs]

    async def _enqueue_batch(self, batch: list[NewJob]) -> None:
        scripts = self._session.scripts_of(batch[0].id)
        while batch:
            # Ids are made here, so a call whose reply was lost can be repeated: what
            # it had recorded comes back as a duplicate of itself.
            replies = await self._session.patiently(
                lambda: scripts.enqueue(batch, self._limits)  # noqa: B023
            )
            refused = self._record(batch, replies)
            batch = [job for job, _ in refused]
            if not refused:
                return
            retry_after_s = min(max(s for _, s in refused), _LONGEST_RETRY_S)
            await asyncio.sleep(retry_after_s * random.uniform(0.5, 1.5))  # noqa: S311

    def _record(
        self, batch: list[NewJob], replies: Sequence[EnqueueReply]
    ) -> list[tuple[NewJob, float]]:
        """Keeps handles, and returns what has to be tried again and when.

        The whole batch is recorded before a refusal is raised.
        """
        refused: list[tuple[NewJob, float]] = []
        error: TokenmillError | None = None
        for job, reply in zip(batch, replies, strict=True):
            if reply.status == "full":
                retry_after_s = reply.retry_after_s or 1.0
                refused.append((job, retry_after_s))
                if self._when_full == "raise":
                    error = error or QueueFull(reply.detail, retry_after_s)
            elif reply.status == "conflict":
                error = error or _conflict(job, reply)
            elif reply.status == "invalid":
                error = error or InvalidRequest("enqueue", reply.detail)
            else:
                self._keep(job, reply)
        if error is not None:
            raise error
        return refused

    def _keep(self, job: NewJob, reply: EnqueueReply) -> None:
        job_id = job.id
        duplicate = reply.status == "duplicate" and reply.job_id != str(job_id)
        if duplicate:
            job_id = JobId.parse(reply.job_id)
        self._handles[job.id.unique] = Job(self._session, job_id, duplicate=duplicate)


def _conflict(job: NewJob, reply: EnqueueReply) -> IdempotencyConflict:
    return IdempotencyConflict(
        f"idempotency key '{job.idempotency_key}' of tenant '{job.tenant}' was used "
        f"by job {reply.job_id} with another request; use a new key, or send the same"
    )


def _batches(jobs: Sequence[NewJob]) -> list[list[NewJob]]:
    """Splits jobs by shard, number and bytes, keeping their order within a shard."""
    full: list[list[NewJob]] = []
    filling: dict[tuple[str, int], tuple[list[NewJob], int]] = {}
    for job in jobs:
        shard = (job.id.model, job.id.partition)
        batch, size = filling.get(shard, ([], 0))
        if batch and (
            len(batch) >= _BATCH_JOBS or size + len(job.payload) > _BATCH_BYTES
        ):
            full.append(batch)
            batch, size = [], 0
        batch.append(job)
        filling[shard] = (batch, size + len(job.payload))
    return [*full, *(batch for batch, _ in filling.values())]
