"""The jobs this worker holds: one mutable record each, owned by the event loop."""

import asyncio
from collections.abc import Callable, Iterator

from ..shared.messages import Choice, FinishReason, JobRequest, TokenLogprob
from ..shared.script_types import Started
from .engine.request import Emitted, EngineRequest, TokenDelta


class Progress:
    """All output of one choice so far, over all epochs."""

    __slots__ = (
        "finish_reason",
        "last_at",
        "logprobs",
        "stop_reason",
        "texts",
        "token_ids",
    )

    def __init__(self, emitted: Emitted | None = None) -> None:
        earlier = emitted or Emitted()
        self.token_ids = list(earlier.token_ids)
        self.texts = [earlier.text]
        self.logprobs: list[TokenLogprob] = list(earlier.logprobs or ())
        self.finish_reason = earlier.finish_reason
        self.stop_reason = earlier.stop_reason
        self.last_at = 0.0
        """`time.monotonic()` of its last tokens here; 0 before any."""

    def add(self, delta: TokenDelta) -> None:
        """Appends what one step produced."""
        self.token_ids += delta.token_ids
        self.texts.append(delta.text)
        self.logprobs += delta.logprobs or ()
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def choice(self, index: int, unfinished: FinishReason) -> Choice:
        """Returns the output as a result shows it.

        Args:
            index: Number of the choice.
            unfinished: The reason to give if the choice had not ended by itself.
        """
        return Choice(
            index=index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason or unfinished,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if self.logprobs else None,
        )


class RunningJob:
    """One job between its start here and its recorded end.

    Args:
        started: What the start script returned.
        request: The decoded payload.
        engine_request: What the engine gets.
    """

    __slots__ = (
        "closing",
        "engine_id",
        "epoch",
        "expiry",
        "first_ms",
        "id",
        "on_left",
        "opened",
        "progress",
        "prompt_tokens",
        "request",
        "seq",
        "started",
        "unsent",
    )

    def __init__(
        self, started: Started, request: JobRequest, engine_request: EngineRequest
    ) -> None:
        self.id = started.job_id
        self.epoch = started.epoch
        self.engine_id = engine_request.id
        self.started = started
        self.request = request
        self.prompt_tokens = len(engine_request.token_ids)
        self.progress = {
            index: Progress(emitted)
            for index, emitted in enumerate(engine_request.emitted)
        }
        self.opened: set[int] = set()
        """Choices whose first delta of this epoch is on its way."""
        self.seq = 0
        self.unsent = 0
        """Deltas sealed and not yet acknowledged by Redis."""
        self.first_ms = started.first_ms
        self.closing = False
        """No further output of the engine is taken."""
        self.expiry: asyncio.TimerHandle | None = None
        self.on_left: Callable[[], None] | None = None
        """Called once the job has left this worker."""

    def take(self, delta: TokenDelta) -> Progress:
        """Appends what one step produced to its choice, which it returns."""
        progress = self.progress.get(delta.choice)
        if progress is None:
            progress = self.progress[delta.choice] = Progress()
        progress.add(delta)
        return progress

    def next_seq(self) -> int:
        """Returns the next sequence number within the epoch, from 1."""
        self.seq += 1
        return self.seq

    def choices(self, unfinished: FinishReason) -> tuple[Choice, ...]:
        """Returns the output of every choice that has any, in order."""
        return tuple(
            part.choice(index, unfinished)
            for index, part in sorted(self.progress.items())
        )


class JobTable:
    """The jobs in hand, found by job id or by the engine's id."""

    def __init__(self) -> None:
        self._by_id: dict[str, RunningJob] = {}
        self._by_engine_id: dict[str, RunningJob] = {}
        self.empty = asyncio.Event()
        """Set while no job is in hand."""
        self.empty.set()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[RunningJob]:
        return iter(tuple(self._by_id.values()))

    def add(self, job: RunningJob) -> RunningJob | None:
        """Enters a job.

        Returns:
            The record it replaces: an earlier epoch of the same job that this worker
            has lost without knowing it yet; or None.
        """
        earlier = self._by_id.get(job.id)
        if earlier is not None:
            self.remove(earlier)
        self._by_id[job.id] = job
        self.empty.clear()
        self._by_engine_id[job.engine_id] = job
        return earlier

    def remove(self, job: RunningJob) -> None:
        """Takes a job out; harmless when it is out already."""
        if self._by_id.get(job.id) is job:
            del self._by_id[job.id]
            if not self._by_id:
                self.empty.set()
        self._by_engine_id.pop(job.engine_id, None)
        job.closing = True
        if job.expiry is not None:
            job.expiry.cancel()
            job.expiry = None
        if job.on_left is not None:
            job.on_left()
            job.on_left = None

    def get(self, job_id: str) -> RunningJob | None:
        """Returns the job, or None when it is not here."""
        return self._by_id.get(job_id)

    def by_engine_id(self, engine_id: str) -> RunningJob | None:
        """Returns the job of an engine request, or None when it is not here."""
        return self._by_engine_id.get(engine_id)

    def holds(self, job: RunningJob) -> bool:
        """Whether this very record is still in the table."""
        return self._by_id.get(job.id) is job
