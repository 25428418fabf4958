"""One thread that runs `Engine.step()`; the event loop talks to it by commands.

The engine is single-threaded by design. Commands wait in a queue and are applied
between two steps; what comes out is handed to the event loop in one call per turn.
"""

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec
import structlog

from ..shared.errors import InvalidRequest, TokenmillError
from ..shared.messages import JobError
from ..shared.metrics.catalog import STEP_SECONDS
from ..shared.metrics.instruments import OTHER
from .engine.device_errors import is_device_lost
from .engine.request import Capacity, EngineRequest, StepOutput

_CAPACITY_EVERY_S: Final = 0.05
"""The counters are for heartbeats; a fresh copy after each step would be waste."""
MAX_FAILED_STEPS: Final = 3
"""Failed steps in a row after which the engine itself is taken to be broken."""


class EngineLike(Protocol):
    """What the worker needs of an engine."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Takes a request, or raises for that request alone."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Drops a request; no output of it follows."""
        ...

    def step(self) -> StepOutput:
        """Plans, runs and delivers one step."""
        ...

    def capacity(self) -> Capacity:
        """Room and counters."""
        ...

    def check_integrity(self) -> None:
        """Raises if the engine's accounts do not add up."""
        ...


class Refused(msgspec.Struct, frozen=True):
    """A request that the engine would not take."""

    engine_id: str
    error: JobError


class Fault(msgspec.Struct, frozen=True):
    """A step failed as a whole; these requests were in the engine and are out now."""

    engine_ids: tuple[str, ...]
    error: JobError
    fatal: bool
    """The engine cannot go on; the process must be replaced."""


Report = StepOutput | Refused | Fault
_Command = Callable[[], None]


def job_error(error: BaseException) -> JobError:
    """Returns an exception as it is recorded with a job."""
    if isinstance(error, InvalidRequest):
        return JobError(code=error.code, message=str(error), field=error.field)
    if isinstance(error, TokenmillError):
        return JobError(code=error.code, message=str(error))
    message = f"{type(error).__name__}: {error}"
    return JobError(code="engine_error", message=message)


class EngineThread:
    """Runs an engine in a thread of its own.

    Args:
        engine: Touched by the thread alone once it runs.
        deliver: Called on the event loop with everything that came out since.
        loop: The event loop of `deliver`.
        model: Under which name its steps are timed.
    """

    def __init__(
        self,
        engine: EngineLike,
        deliver: Callable[[Sequence[Report]], None],
        loop: asyncio.AbstractEventLoop,
        model: str = OTHER,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._loop = loop
        self._model = model
        self._log = structlog.get_logger()
        self._commands: deque[_Command] = deque()
        self._reports: deque[Report] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._paused = False
        self._inside: set[str] = set()
        self._failed_steps = 0
        self._step_began: float | None = None
        self._capacity = engine.capacity()
        self._capacity_at = 0.0
        self._thread = threading.Thread(
            # Log lines of the thread carry the same names as ours.
            target=contextvars.copy_context().run,
            args=(self._run,),
            name="engine",
            daemon=True,
        )

    # --- called by the event loop --------------------------------------------------
    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Gives requests to the engine before its next step."""
        self._command(lambda: self._add(requests))

    def cancel(self, engine_ids: Sequence[str]) -> None:
        """Takes requests out of the engine before its next step."""
        self._command(lambda: self._cancel(engine_ids))

    def pause(self, paused: bool) -> None:
        """Holds or continues stepping; commands are applied all the same."""
        if paused != self._paused:
            self._paused = paused
            self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its present step.

        Returns:
            Whether it ended within `timeout_s` seconds.
        """
        self._stopping = True
        self._wake.set()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def step_age_s(self) -> float:
        """Returns how long the present step has been running; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def capacity(self) -> Capacity:
        """The engine's counters, a moment old."""
        return self._capacity

    # --- the thread ------------------------------------------------------------------
    def _command(self, command: _Command) -> None:
        self._commands.append(command)
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            while self._commands:
                self._commands.popleft()()
            if self._engine.has_work and not self._paused:
                self._step()
                self._refresh_capacity()
            else:
                self._refresh_capacity(now=True)
                self._wake.wait()

    def _step(self) -> None:
        self._step_began = began = time.monotonic()
        try:
            output = self._engine.step()
            STEP_SECONDS.observe(time.monotonic() - began, self._model)
        except Exception as error:  # noqa: BLE001 - any fault must end as a report
            self._step_failed(error)
            return
        finally:
            self._step_began = None
        self._failed_steps = 0
        for finished in output.finished:
            self._inside.discard(finished.request_id)
        if output.deltas or output.finished:
            self._report(output)

    def _step_failed(self, error: Exception) -> None:
        self._failed_steps += 1
        self._log.error("step_failed", jobs=len(self._inside), exc_info=error)
        engine_ids = tuple(sorted(self._inside))
        fatal = self._failed_steps >= MAX_FAILED_STEPS or is_device_lost(error)
        try:
            self._cancel(engine_ids)
            self._engine.check_integrity()
        except Exception as broken:  # noqa: BLE001 - reported as fatal below
            self._log.error("engine_broken", exc_info=broken)
            fatal = True
        self._inside.clear()
        self._report(Fault(engine_ids, job_error(error), fatal))

    def _add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            try:
                self._engine.add(request)
            except Exception as error:  # noqa: BLE001 - fails this request alone
                if not isinstance(error, TokenmillError):
                    self._log.error("request_refused_by_fault", exc_info=error)
                self._report(Refused(request.id, job_error(error)))
            else:
                self._inside.add(request.id)

    def _cancel(self, engine_ids: Sequence[str]) -> None:
        for engine_id in engine_ids:
            if engine_id in self._inside:
                self._engine.cancel(engine_id)
                self._inside.discard(engine_id)

    def _refresh_capacity(self, *, now: bool = False) -> None:
        clock = time.monotonic()
        if now or clock - self._capacity_at >= _CAPACITY_EVERY_S:
            self._capacity = self._engine.capacity()
            self._capacity_at = clock

    def _report(self, report: Report) -> None:
        self._reports.append(report)
        if len(self._reports) == 1:
            try:
                self._loop.call_soon_threadsafe(self._hand_over)
            except RuntimeError:
                # The loop is closed: the process is ending and nobody listens.
                self._stopping = True

    def _hand_over(self) -> None:
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        if reports:
            self._deliver(reports)
