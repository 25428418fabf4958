"""How jobs leave this worker: recorded, failed for a retry, or handed back."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from ..shared.clock import RedisClock
from ..shared.config import SchedulerConfig
from ..shared.job_line import JOB_EVENT, job_line
from ..shared.keys import bucket_of
from ..shared.messages import (
    CANCELLED,
    DEFAULT_VERSION,
    Delta,
    End,
    FinishReason,
    JobResult,
    Timings,
    Usage,
    encode,
)
from ..shared.metrics.catalog import JOBS_LOST
from ..shared.metrics.jobs import count_end
from ..shared.script_types import DEAD_MS, EmitItem, EmitStatus, EndState, FinishItem
from ..shared.scripts import Scripts
from .ending import RECORDED, Ending, Way
from .jobs import JobTable, RunningJob

FINISH_BATCH: Final = 128
"""Jobs in one call; results are larger than deltas."""
_RETRY_FIRST_MS: Final = 500
_RETRY_LONGEST_MS: Final = 30_000
"""Bounds of the jittered wait before a job that met a fault runs again."""
_STATES: Final[Mapping[Way, EndState]] = {
    Way.SUCCEEDED: "succeeded",
    Way.FAILED: "failed",
    Way.CANCELLED: "cancelled",
    Way.EXPIRED: "expired",
    Way.FAULT: "failed",
}
"""What is recorded; for a fault, once no attempts are left."""
_UNFINISHED: Final = {
    Way.CANCELLED: FinishReason.CANCELLED,
    Way.EXPIRED: FinishReason.EXPIRED,
}


class Recorder:
    """Writes ends of jobs to Redis and one canonical log line for each.

    Args:
        scripts: Redis.
        group: This incarnation of the worker.
        model: Public name of the model.
        weights_version: What was computed with.
        version: Of the model.
        table: The jobs in hand.
        clock: Redis time.
        buckets: Bounds of the length buckets, for the log line.
        limits: How many attempts a job has.
        dead_ms: How long what was given up here is kept.
    """

    def __init__(
        self,
        *,
        scripts: Scripts,
        group: str,
        model: str,
        weights_version: str,
        version: str = DEFAULT_VERSION,
        table: JobTable,
        clock: RedisClock,
        buckets: tuple[int, ...],
        limits: SchedulerConfig,
        dead_ms: int = DEAD_MS,
    ) -> None:
        self._scripts = scripts
        self._group = group
        self._model = model
        self._weights_version = weights_version
        self._version = version
        self._table = table
        self._clock = clock
        self._buckets = buckets
        self._limits = limits
        self._dead_ms = dead_ms
        self._log = structlog.get_logger().bind()

    def batches(self, endings: Sequence[Ending]) -> Iterator[list[Ending]]:
        """Yields `endings` in groups that `write` takes in one call."""
        recorded = [e for e in endings if e.way in RECORDED]
        for start in range(0, len(recorded), FINISH_BATCH):
            yield recorded[start : start + FINISH_BATCH]
        released = [ending for ending in endings if ending.way is Way.RELEASE]
        if released:
            yield released
        yield from ([ending] for ending in endings if ending.way is Way.FAULT)

    async def write(self, batch: Sequence[Ending]) -> None:
        """Writes ends that leave the same way; may be repeated, changes nothing then.

        Args:
            batch: What `batches` yielded, or a part of it.
        """
        if batch[0].way is Way.RELEASE:
            await self._release(batch)
        elif batch[0].way is Way.FAULT:
            await self._fault(batch[0])
        else:
            await self._record(batch)

    async def write_after(
        self, deltas: Sequence[EmitItem], endings: Sequence[Ending]
    ) -> list[EmitStatus]:
        """Writes last deltas, then ends that are all in `RECORDED`, in one round trip.

        Args:
            deltas: What was not sent yet.
            endings: Ends of jobs that have no other delta left.

        Returns:
            What became of the deltas.
        """
        built = [self._built(ending) for ending in endings]
        emitted, recorded = await self._scripts.emit_and_finish(
            group=self._group, deltas=deltas, ends=[item for item, _ in built]
        )
        for ending, (_, result), status in zip(endings, built, recorded, strict=True):
            self._recorded(ending, result, status)
        return emitted

    # --- terminal ------------------------------------------------------------------
    async def _record(self, batch: Sequence[Ending]) -> None:
        built = [self._built(ending) for ending in batch]
        items = [item for item, _ in built]
        statuses = await self._scripts.finish(group=self._group, items=items)
        for ending, (_, result), status in zip(batch, built, statuses, strict=True):
            self._recorded(ending, result, status)

    def _built(self, ending: Ending) -> tuple[FinishItem, JobResult]:
        if ending.built is None:
            ending.built = self._build(ending)
        return ending.built

    def _build(self, ending: Ending) -> tuple[FinishItem, JobResult]:
        job = ending.job
        state = _STATES[ending.way]
        unfinished = _UNFINISHED.get(ending.way, FinishReason.ERROR)
        own = ending.choices
        choices = job.choices(unfinished) if own is None else own
        usage = Usage(
            prompt_tokens=job.prompt_tokens,
            completion_tokens=sum(len(choice.token_ids) for choice in choices),
        )
        result = JobResult(
            id=job.id,
            state=state,
            model=self._model,
            choices=choices,
            usage=usage,
            timings=self._timings(job),
            error=ending.error,
            weights_version=self._weights_version,
            version=self._version,
            adapter=job.request.adapter,
        )
        end = End(
            state=state,
            finish_reasons=tuple(choice.finish_reason for choice in choices),
            usage=usage,
            error=ending.error,
        )
        item = FinishItem(
            job_id=job.id,
            epoch=job.epoch,
            seq=job.next_seq(),
            state=state,
            result=encode(result),
            end=encode(Delta(end=end)),
            error=encode(ending.error).decode() if ending.error else "",
        )
        return item, result

    def _timings(self, job: RunningJob) -> Timings:
        enqueued = job.started.enqueued_ms
        if not enqueued:
            return Timings()  # cancelled before its start was answered
        # Our copy of the clock may be a millisecond behind; no stage ends too early.
        queued = max(0.0, job.started.started_ms - enqueued)
        first = None if job.first_ms is None else max(queued, job.first_ms - enqueued)
        total = max(first or queued, self._clock.now_ms() - enqueued)
        return Timings(queued_ms=queued, ttft_ms=first, total_ms=total)

    def _recorded(self, ending: Ending, result: JobResult, status: str) -> None:
        job = ending.job
        self._table.remove(job)
        if status == "lost":
            self._log.warning("job_lost", job=job.id, epoch=job.epoch, at="finish")
            JOBS_LOST.add()
            return
        self._say(job, result)

    def _say(self, job: RunningJob, result: JobResult) -> None:
        job_class, tenant = job.started.job_class, job.started.tenant
        count_end(result, job_class, tenant, job.prompt_tokens)
        fields = job_line(
            result,
            job_class=job_class,
            tenant=tenant,
            bucket=bucket_of(job.prompt_tokens, self._buckets),
            prompt_tokens=job.prompt_tokens,
            epoch=job.epoch,
        )
        self._log.info(JOB_EVENT, **fields)

    # --- back to the queue ---------------------------------------------------------
    async def _release(self, endings: Sequence[Ending]) -> None:
        jobs = [(ending.job.id, ending.job.epoch) for ending in endings]
        await self._scripts.release(group=self._group, jobs=jobs)
        for ending in endings:
            self._table.remove(ending.job)
            self._log.info("job_released", job=ending.job.id, epoch=ending.job.epoch)

    async def _fault(self, ending: Ending) -> None:
        job = ending.job
        item, result = self._built(ending)
        attempt = job.started.attempts
        bound = min(_RETRY_LONGEST_MS, _RETRY_FIRST_MS * 2 ** min(attempt, 16))
        delay_ms = random.randint(1, bound)  # noqa: S311 - jitter, not a secret
        status = await self._scripts.fail(
            group=self._group,
            job_id=job.id,
            epoch=job.epoch,
            error=item.error,
            delay_ms=delay_ms,
            max_attempts=self._limits.max_attempts,
            result=item.result,
            end=item.end,
            dead_ms=self._dead_ms,
        )
        self._table.remove(job)
        self._log.warning(
            "job_fault",
            job=job.id,
            epoch=job.epoch,
            outcome=status,
            attempt=attempt + 1,
            retry_in_ms=delay_ms if status == "retrying" else None,
            error=ending.error.message if ending.error else None,
        )
        if status == "failed":
            self._say(job, result)
        elif status == "cancelled":  # a cancel that was asked for is its end
            ended = {"state": "cancelled", "error": CANCELLED, "choices": ()}
            self._say(job, msgspec.structs.replace(result, **ended))
