"""Putting prepared jobs into the queue: in batches, again after a lost reply."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from ..shared.errors import (
    DeadlineUnreachable,
    IdempotencyConflict,
    InvalidRequest,
    PayloadTooLarge,
    QueueFull,
    TokenmillError,
)
from ..shared.keys import JobId
from ..shared.messages import PoolCard
from ..shared.script_types import EnqueueReply, NewJob
from ..shared.tasks import end_tasks
from .grouping import CALL_BYTES, CALL_JOBS
from .job import Job
from .session import Session

WhenFull = Literal["raise", "wait"]
WhenUnserved = Literal["refuse", "wait"]

_LONGEST_RETRY_S: Final = 1.0
"""An ask costs little, and room may come long before the estimate says."""

_IN_FLIGHT: Final = 2
"""Calls under way: one is packed while Redis works on the other."""

_Placed = tuple[int, NewJob]
"""A job with its position in the call."""


class Submission:
    """Jobs on their way into the queue, and what became of them.

    Args:
        session: The client's connections.
        pool: The pool's settings.
        when_full: `wait` retries what found the queue full, `raise` does not.
        wait_s: Seconds for which that is done; None is for ever.
    """

    def __init__(
        self,
        session: Session,
        pool: PoolCard,
        when_full: WhenFull,
        wait_s: float | None = None,
    ) -> None:
        self._session = session
        self._pool = pool
        self._when_full = when_full
        self._give_up = None if wait_s is None else time.monotonic() + wait_s
        self._handles: dict[int, Job] = {}
        self._refused: dict[int, TokenmillError] = {}
        self._full: dict[str | None, QueueFull] = {}
        """Tenant, or None for the whole queue -> why nothing more is sent for it."""

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Job]:
        """Enqueues jobs. What is refused stops no other: of many, the rest goes on.

        Args:
            jobs: Of any shards.

        Returns:
            A handle for each, in the same order.

        Raises:
            QueueFull: A limit was reached and `when_full` is `raise`, or there was no
                room in time.
            DeadlineUnreachable: A job is to be refused when late, and would be.
            IdempotencyConflict: A key was used before with another payload.
            RedisUnavailable: Redis did not answer for longer than the patience.
            StorageUnavailable: An input too large for Redis could not be stored.
        """
        await self._upload(jobs)
        waiting = list(enumerate(jobs))
        try:
            while waiting := await self._round(waiting):
                await self._wait_for_room()
            if self._refused:
                raise self._refused[min(self._refused)]
        except TokenmillError as error:
            # The first job of a known key is not of this call: nobody may take it back.
            error.enqueued = tuple(
                handle.id for handle in self._handles.values() if not handle.duplicate
            )
            error.refused = self._refused
            raise
        return [self._handles[index] for index in range(len(jobs))]

    async def _upload(self, jobs: Sequence[NewJob]) -> None:
        """Puts inputs by reference where their jobs will look for them."""
        uploads = [job.upload for job in jobs if job.upload is not None]
        if uploads:
            store = await self._session.store(self._pool)
            await asyncio.gather(*(store.write(*upload) for upload in uploads))

    async def _round(self, jobs: Sequence[_Placed]) -> list[_Placed]:
        """Tries all jobs once; returns those that found no room and may still wait.

        A tenant that is full is asked no further, and jobs of others go on. Two calls
        of a shard may be under way, so that jobs of one may pass those of the other.
        """
        self._full.clear()
        await self._try_all(list(_batches(jobs)))
        held = [placed for placed in jobs if not self._is_settled(placed[0])]
        if held and not self._may_wait():
            for index, job in held:
                self._refused[index] = self._full.get(None) or self._full[job.tenant]
            return []
        return held

    async def _try_all(self, batches: Sequence[Sequence[_Placed]]) -> None:
        if len(batches) == 1:
            return await self._try(batches[0])
        sending: deque[asyncio.Task[None]] = deque()
        try:
            for batch in batches:
                if len(sending) >= _IN_FLIGHT:
                    await sending[0]
                    sending.popleft()
                sending.append(asyncio.create_task(self._try(batch)))
            for task in sending:
                await task
        except TokenmillError:
            # What is under way may be recorded: who asked is to know.
            await asyncio.gather(*sending, return_exceptions=True)
            raise
        finally:
            await end_tasks(*sending)

    async def _try(self, batch: Sequence[_Placed]) -> None:
        going = [placed for placed in batch if not self._limit_of(placed[1])]
        for placed, reply in zip(going, await self._send(going), strict=True):
            self._note(placed, reply)

    def _is_settled(self, index: int) -> bool:
        return index in self._handles or index in self._refused

    def _limit_of(self, job: NewJob) -> QueueFull | None:
        return self._full.get(None) or self._full.get(job.tenant)

    async def _send(self, batch: Sequence[_Placed]) -> list[EnqueueReply]:
        if not batch:
            return []
        if len(batch) == 1:
            return [await self._session.grouping.enqueue(batch[0][1])]
        jobs = [job for _, job in batch]
        scripts = self._session.scripts_of(jobs[0].id)
        # Ids are made here, so a call whose reply was lost can be repeated: what it had
        # recorded comes back as a duplicate of itself.
        return await self._session.patiently(lambda: scripts.enqueue(jobs))

    def _note(self, placed: _Placed, reply: EnqueueReply) -> None:
        index, job = placed
        if reply.status in ("queued", "duplicate"):
            self._handles[index] = self._handle(job, reply)
        elif reply.status == "full":
            limit = reply.detail.partition(":")[0]
            whose = job.tenant if limit.startswith("tenant_") else None
            full = QueueFull(reply.detail, reply.retry_after_s or 1.0, limit)
            self._full.setdefault(whose, full)
        elif reply.status == "late":
            needed_s, given_s = reply.needed_s or 0.0, (job.deadline_ms or 0) / 1000
            self._refused[index] = DeadlineUnreachable(needed_s, given_s)
        elif reply.status == "conflict":
            self._refused[index] = _conflict(job, reply)
        else:
            self._refused[index] = _invalid(reply.detail)

    def _handle(self, job: NewJob, reply: EnqueueReply) -> Job:
        if reply.status == "queued" or reply.job_id == str(job.id):
            return Job(self._session, job.id)
        return Job(self._session, JobId.parse(reply.job_id), duplicate=True)

    def _may_wait(self) -> bool:
        in_time = self._give_up is None or time.monotonic() < self._give_up
        return self._when_full == "wait" and in_time

    async def _wait_for_room(self) -> None:
        soonest_s = min(full.retry_after_s for full in self._full.values())
        wait_s = min(soonest_s, _LONGEST_RETRY_S) * random.uniform(0.5, 1.5)  # noqa: S311
        if self._give_up is not None:
            wait_s = min(wait_s, max(self._give_up - time.monotonic(), 0.0))
        await asyncio.sleep(wait_s)


def _invalid(detail: str) -> InvalidRequest:
    """What the script found wrong: the name of a field, a colon, and the rest."""
    field, _, problem = detail.partition(": ")
    if not problem:
        return InvalidRequest("enqueue", detail)
    kind = PayloadTooLarge if field == "payload" else InvalidRequest
    return kind(field, problem)


def _conflict(job: NewJob, reply: EnqueueReply) -> IdempotencyConflict:
    return IdempotencyConflict(
        f"idempotency key '{job.idempotency_key}' of tenant '{job.tenant}' was used "
        f"by job {reply.job_id} with another request; use a new key, or send the same"
    )


def _batches(jobs: Sequence[_Placed]) -> Iterator[list[_Placed]]:
    """Splits jobs by shard, number and bytes, keeping their order within a shard."""
    filling: dict[tuple[str, int], list[_Placed]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for index, job in jobs:
        shard, size = (job.id.model, job.id.partition), len(job.payload)
        batch = filling.setdefault(shard, [])
        full = len(batch) >= CALL_JOBS or sizes.get(shard, 0) + size > CALL_BYTES
        if batch and full:
            yield batch
            batch = filling[shard] = []
            sizes[shard] = 0
        batch.append((index, job))
        sizes[shard] = sizes.get(shard, 0) + size
    yield from filling.values()
