"""The same client for code without an event loop, usable from many threads."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Self, TypeVar

from ..shared.errors import TokenmillError
from ..shared.messages import Delta, End, JobResult, ModelCard, Prompt
from .accounts import SyncAccountCalls
from .adapters.calls import SyncAdapterCalls
from .assembler import Position
from .client import PATIENCE_S, Client
from .dead_calls import SyncDeadCalls
from .info import JobInfo, ModelInfo
from .job import Job
from .loop_thread import LoopThread as LoopThread
from .models.calls import SyncVersionCalls
from .stream import TokenStream
from .submit import WhenFull, WhenUnserved
from .watch.history import HistorySample
from .watch.snapshot import PoolSnapshot

T = TypeVar("T")


async def _next(source: AsyncIterator[T]) -> T | None:
    """The next item, or None at the end: StopIteration cannot cross a future."""
    return await anext(source, None)


class SyncStream:
    """A blocking iterator over a job's deltas; see `TokenStream`."""

    def __init__(self, thread: LoopThread, stream: TokenStream) -> None:
        self._thread = thread
        self._stream = stream

    @property
    def end(self) -> End | None:
        """How the job ended; None while it goes on."""
        return self._stream.end

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        delta = self._thread.run(_next(self._stream))
        if delta is None:
            raise StopIteration
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin(self) -> None:
        """Reads what is there already; see `TokenStream.begin`."""
        self._thread.run(self._stream.begin())

    def close(self) -> None:
        """Stops following; cancels the job if asked to and it has not ended."""
        self._thread.run(self._stream.aclose())


class SyncJob:
    """A handle on one job; see `Job`."""

    def __init__(self, thread: LoopThread, job: Job) -> None:
        self._thread = thread
        self._job = job

    @property
    def inner(self) -> Job:
        """The asynchronous handle, which belongs to the client's own loop."""
        return self._job

    def __repr__(self) -> str:
        return f"SyncJob({self.id!r})"

    @property
    def id(self) -> str:
        """The job's id."""
        return self._job.id

    @property
    def model(self) -> str:
        """Public name of the model that serves it."""
        return self._job.model

    @property
    def duplicate(self) -> bool:
        """Whether the idempotency key was known, so that this is the earlier job."""
        return self._job.duplicate

    @property
    def outcome(self) -> JobResult | None:
        """The recorded result, good or bad, where this handle has seen it."""
        return self._job.outcome

    def result(self, timeout: float | None = None) -> JobResult:
        """Waits for the end and returns the result; see `Job.result`."""
        return self._thread.run(self._job.result(timeout))

    def done(self) -> bool:
        """Whether the job has ended, well or not."""
        return self._thread.run(self._job.done())

    def stream(
        self,
        from_offset: int = 0,
        *,
        positions: Mapping[int, Position] | None = None,
        cancel_on_leave: bool = False,
    ) -> SyncStream:
        """Follows the output; see `Job.stream`."""
        stream = self._job.stream(
            from_offset, positions=positions, cancel_on_leave=cancel_on_leave
        )
        return SyncStream(self._thread, stream)

    def cancel(self) -> str:
        """Asks for the job to stop; see `Job.cancel`."""
        return self._thread.run(self._job.cancel())

    def info(self) -> JobInfo:
        """Returns the job's record as it is now."""
        return self._thread.run(self._job.info())


class SyncClient(SyncDeadCalls, SyncAccountCalls, SyncAdapterCalls, SyncVersionCalls):
    """A connection to a pool for blocking code; any number of threads may share it.

    ```python
    with SyncClient() as mill:
        print(mill.submit("Why is the sky blue?").result().text)
    ```

    Args:
        url: Where the pool's Redis is; see `Client`.
        patience_s: Seconds for which a blip of Redis is waited out.
    """

    def __init__(
        self, url: str | None = None, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._client = Client(url, patience_s=patience_s)
        self._running: LoopThread | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """Connects; `with` does it. See `Client.open`."""
        if self._running is not None:
            return
        thread = LoopThread()
        try:
            thread.run(self._client.open())
        except BaseException:
            thread.stop()
            raise
        self._running = thread

    def close(self) -> None:
        """Ends connections and the thread; calls in other threads fail."""
        thread, self._running = self._running, None
        if thread is not None:
            thread.run(self._client.close())
            thread.stop()

    @property
    def _thread(self) -> LoopThread:
        if self._running is None:
            raise TokenmillError(
                "the client is not open; use it inside `with SyncClient() as mill:`"
            )
        return self._running

    def submit(
        self,
        prompt: Prompt | str,
        *,
        when_unserved: WhenUnserved = "refuse",
        when_full: WhenFull = "raise",
        wait_s: float | None = None,
    ) -> SyncJob:
        """Enqueues one prompt; see `Client.submit`."""
        job = self._thread.run(
            self._client.submit(
                prompt,
                when_unserved=when_unserved,
                when_full=when_full,
                wait_s=wait_s,
            )
        )
        return SyncJob(self._thread, job)

    def submit_many(
        self,
        prompts: Iterable[Prompt | str],
        *,
        when_unserved: WhenUnserved = "refuse",
        when_full: WhenFull = "wait",
        wait_s: float | None = None,
        is_one_request: bool = False,
    ) -> list[SyncJob]:
        """Enqueues many prompts in few round trips; see `Client.submit_many`."""
        jobs = self._thread.run(
            self._client.submit_many(
                list(prompts),
                when_unserved=when_unserved,
                when_full=when_full,
                wait_s=wait_s,
                is_one_request=is_one_request,
            )
        )
        return [SyncJob(self._thread, job) for job in jobs]

    def as_completed(self, jobs: Iterable[SyncJob | str]) -> Iterator[SyncJob]:
        """Yields jobs as they end; see `Client.as_completed`."""
        by_id = {
            job.id: job
            for job in (self.job(j) if isinstance(j, str) else j for j in jobs)
        }
        thread = self._thread
        completions = self._client.as_completed([j.inner for j in by_id.values()])
        try:
            while (job := thread.run(_next(completions))) is not None:
                yield by_id[job.id]
        finally:
            thread.run(completions.aclose())

    def job(self, job_id: str) -> SyncJob:
        """Returns a handle on a job that anyone submitted."""
        return SyncJob(self._thread, self._client.job(job_id))

    def jobs(self, limit: int = 50, state: str | None = None) -> list[JobInfo]:
        """Returns the newest jobs of the pool, newest first; see `Client.jobs`."""
        return self._thread.run(self._client.jobs(limit, state))

    def models(self) -> list[ModelInfo]:
        """Returns the models that the pool knows, and how many workers serve each."""
        return self._thread.run(self._client.models())

    def model_card(self, name: str) -> ModelCard | None:
        """Returns what workers say of a model; None when none has ever started."""
        return self._thread.run(self._client.model_card(name))

    def snapshot(self) -> PoolSnapshot:
        """Returns the pool at this moment; see `Client.snapshot`."""
        return self._thread.run(self._client.snapshot())

    def history(self, last: int = 360) -> list[HistorySample]:
        """Returns samples of the last hour, oldest first; see `Client.history`."""
        return self._thread.run(self._client.history(last))
