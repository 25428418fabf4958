"""What goes where between Redis and the engine: requests in, output and ends out."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from ..shared.clock import RedisClock
from ..shared.messages import Choice
from ..shared.metrics.catalog import JOBS_LOST
from .ending import Ending, Way
from .engine.request import EngineRequest, Finished, StepOutput, TokenDelta
from .engine_thread import EngineThread, Fault, Refused, Report
from .jobs import JobTable, RunningJob
from .publish import MAX_BUFFERED_TOKENS, Publisher


class Router:
    """Joins the job table, the engine's thread and the publisher.

    Args:
        table: The jobs in hand.
        clock: Redis time, for deadlines.
        on_broken: Called when the engine cannot go on.
    """

    def __init__(
        self, table: JobTable, clock: RedisClock, on_broken: Callable[[], None]
    ) -> None:
        self._table = table
        self._clock = clock
        self._on_broken = on_broken
        self._log = structlog.get_logger()
        self._thread: EngineThread
        self._publisher: Publisher
        self.broken = False
        """The engine has said that it cannot go on."""

    def connect(self, thread: EngineThread, publisher: Publisher) -> None:
        """Sets the two parts that are built with this router's methods."""
        self._thread = thread
        self._publisher = publisher

    # --- in ------------------------------------------------------------------------
    def take(self, jobs: Sequence[tuple[RunningJob, EngineRequest]]) -> None:
        """Gives started jobs to the engine and watches their deadlines."""
        for job, _ in jobs:
            self.watch(job)
        self._thread.add([request for _, request in jobs])

    def watch(self, job: RunningJob) -> None:
        """Sees to it that a job ends at its deadline."""
        deadline_ms = job.started.deadline_ms
        if deadline_ms is not None and job.expiry is None:
            left_s = (deadline_ms - self._clock.now_ms()) / 1000.0
            loop = asyncio.get_running_loop()
            job.expiry = loop.call_later(max(0.0, left_s), self._expire, job)

    # --- out -----------------------------------------------------------------------
    def deliver(self, reports: Sequence[Report]) -> None:
        """Takes what came out of the engine."""
        for report in reports:
            if isinstance(report, StepOutput):
                for delta in report.deltas:
                    self._delta(delta)
                for finished in report.finished:
                    self._finished(finished)
            elif isinstance(report, Refused):
                self._refused(report)
            else:
                self._fault(report)
        self.hold_or_go_on()

    def hold_or_go_on(self) -> None:
        """Pauses the engine while Redis is far behind with what it made."""
        self._thread.pause(self._publisher.buffered_tokens > MAX_BUFFERED_TOKENS)

    def _delta(self, delta: TokenDelta) -> None:
        job = self._table.by_engine_id(delta.request_id)
        if job is not None and not job.closing:
            self._publisher.add(job, delta)

    def _finished(self, finished: Finished) -> None:
        job = self._table.by_engine_id(finished.request_id)
        if job is None or job.closing:
            return
        if finished.error is not None:
            self._publisher.end(Ending(job, Way.FAILED, error=finished.error))
            return
        choices = tuple(
            Choice(
                index=choice.index,
                text=choice.text,
                token_ids=choice.token_ids,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=choice.logprobs,
            )
            for choice in finished.choices
        )
        self._publisher.end(Ending(job, Way.SUCCEEDED, choices=choices))

    def _refused(self, refused: Refused) -> None:
        job = self._table.by_engine_id(refused.engine_id)
        if job is not None and not job.closing:
            self._publisher.end(Ending(job, Way.FAILED, error=refused.error))

    def _fault(self, fault: Fault) -> None:
        for engine_id in fault.engine_ids:
            job = self._table.by_engine_id(engine_id)
            if job is not None and not job.closing:
                self._publisher.end(Ending(job, Way.FAULT, error=fault.error))
        if fault.fatal:
            self.broken = True
            self._on_broken()

    # --- ends that come from outside -----------------------------------------------
    def cancel(self, job: RunningJob) -> None:
        """Stops a job that somebody has cancelled."""
        self._stop(job, Way.CANCELLED)

    def _expire(self, job: RunningJob) -> None:
        if self._table.holds(job) and not job.closing:
            self._stop(job, Way.EXPIRED)

    def _stop(self, job: RunningJob, way: Way) -> None:
        self._thread.cancel([job.engine_id])
        self._publisher.end(Ending(job, way))

    def lose(self, job: RunningJob) -> None:
        """Drops a job that another epoch owns by now."""
        if self._table.holds(job):
            self._log.warning("job_lost", job=job.id, epoch=job.epoch)
            JOBS_LOST.add()
            self._table.remove(job)
        self.forget(job)

    def forget(self, job: RunningJob) -> None:
        """Drops what the engine and the publisher hold of a job."""
        self._publisher.forget(job)
        self._thread.cancel([job.engine_id])
