"""The asynchronous client: submit prompts, await results, follow streams."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Final, Self

from ..shared.errors import InvalidRequest, TokenmillError
from ..shared.keys import JobId
from ..shared.messages import ModelCard, Prompt
from ..shared.script_types import NewJob
from .accounts import AccountCalls
from .adapters.calls import AdapterCalls
from .completion import Completions
from .dead_calls import DeadCalls
from .info import JobInfo, ModelInfo
from .job import Job as Job
from .listing import recent_jobs
from .models.calls import VersionCalls
from .pool_view import ModelView
from .prepare import as_prompt, hashed_together, new_job, raise_all
from .session import Session
from .submit import Submission, WhenFull, WhenUnserved
from .watch.history import HistorySample, history
from .watch.snapshot import PoolSnapshot, snapshot

PATIENCE_S: Final = 30.0
"""Covers a restart of Redis with a large append-only file; longer is an outage."""
_TURN: Final = 500
"""Prompts checked without a pause: some ten milliseconds."""


class Client(DeadCalls, AccountCalls, AdapterCalls, VersionCalls):
    """A connection to a pool, for use on one event loop.

    ```python
    async with Client() as mill:
        job = await mill.submit("Why is the sky blue?")
        print((await job.result()).text)
    ```

    Args:
        url: Where the pool's Redis is. None takes `TOKENMILL_URL`, the settings, or
            the pool that `tokenmill up` runs here.
        patience_s: Seconds for which a blip of Redis is waited out.
    """

    def __init__(
        self, url: str | None = None, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._url = url
        self._patience_s = patience_s
        self._open: Session | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connects; `async with` does it.

        Raises:
            RedisUnavailable: No pool was found, or it does not answer.
            RedisUnsuitable: It answers and cannot be used (wrong password).
        """
        if self._open is not None:
            return
        from ..shared.connection import find_pool

        session = Session(find_pool(self._url), self._patience_s)
        try:
            await session.ping()
        except BaseException:
            await session.close()
            raise
        self._open = session

    async def close(self) -> None:
        """Ends all connections; `async with` does it."""
        session, self._open = self._open, None
        if session is not None:
            await session.close()

    @property
    def session(self) -> Session:
        """The connections, for what is built on the client: gateway, views, bulk."""
        return self._session

    @property
    def _session(self) -> Session:
        if self._open is None:
            raise TokenmillError(
                "the client is not open; use it inside `async with Client() as mill:`"
            )
        return self._open

    async def submit(
        self,
        prompt: Prompt | str,
        *,
        when_unserved: WhenUnserved = "refuse",
        when_full: WhenFull = "raise",
        wait_s: float | None = None,
    ) -> Job:
        """Enqueues one prompt.

        Args:
            prompt: What to run; text alone is enough.
            when_unserved: Whether a model without a live worker is an error
                (`refuse`) or the job waits in the queue for one (`wait`).
            when_full: Whether a full queue is an error or is waited out.
            wait_s: Seconds to wait for room at most, then it is an error; None waits
                for ever.

        Returns:
            The job; with a known idempotency key, the first one.

        Raises:
            InvalidRequest: A field is wrong; nothing was enqueued.
            UnknownAdapter: The model has no such adapter, or not for this tenant.
            ModelUnavailable: No live worker serves the model, or it retires.
            QueueFull: A limit was reached; carries `limit` and `retry_after_s`.
            DeadlineUnreachable: The prompt is to be refused when late, and would be.
            IdempotencyConflict: The key was used with another payload.
            RedisUnavailable: Redis did not answer for longer than the patience.
        """
        checked = as_prompt(prompt)
        view = await self._open_model(checked.model)
        adapter = await self._session.adapter(checked)
        await self._session.require_version(checked, view)
        job = new_job(checked, view.card, view.pool, adapter=adapter)
        await self._require_served([job], when_unserved)
        submission = Submission(self._session, view.pool, when_full, wait_s)
        return (await submission.enqueue([job]))[0]

    async def submit_many(
        self,
        prompts: Iterable[Prompt | str],
        *,
        when_unserved: WhenUnserved = "refuse",
        when_full: WhenFull = "wait",
        wait_s: float | None = None,
        is_one_request: bool = False,
    ) -> list[Job]:
        """Enqueues many prompts in few round trips.

        Every prompt is checked before the first is enqueued. From then on one that is
        refused stops no other.

        Args:
            prompts: What to run.
            when_unserved: As for `submit`.
            when_full: As for `submit`; here waiting is the default.
            wait_s: As for `submit`, for all together.
            is_one_request: The prompts belong together: used again, an idempotency
                key of one of them is a conflict unless all are the same.

        Returns:
            A job for each prompt, in the same order.

        Raises:
            InvalidBatch: Some prompts are wrong; `errors` has them by position.
            TokenmillError: As for `submit`, of the first that was refused. `refused`
                has all of them by position, `enqueued` the ids of the other jobs.
        """
        jobs = await self._jobs_of(prompts)
        if not jobs:
            return []
        if is_one_request:
            jobs = hashed_together(jobs)
        await self._require_served(jobs, when_unserved)
        pool = await self._session.patiently(self._session.view.pool)
        submission = Submission(self._session, pool, when_full, wait_s)
        return await submission.enqueue(jobs)

    async def _jobs_of(self, prompts: Iterable[Prompt | str]) -> list[NewJob]:
        jobs: list[NewJob] = []
        errors: dict[int, InvalidRequest] = {}
        views: dict[str, ModelView] = {}
        for index, prompt in enumerate(prompts):
            if index % _TURN == _TURN - 1:
                await asyncio.sleep(0)  # other tasks of this loop have their turn
            try:
                checked = as_prompt(prompt)
                view = views.get(checked.model)
                if view is None:
                    view = views[checked.model] = await self._open_model(checked.model)
                adapter = await self._session.adapter(checked)
                await self._session.require_version(checked, view)
                jobs.append(new_job(checked, view.card, view.pool, adapter=adapter))
            except InvalidRequest as error:
                errors[index] = error
        raise_all(errors)
        return jobs

    def as_completed(self, jobs: Iterable[Job | str]) -> AsyncGenerator[Job, None]:
        """Yields jobs as they end, in the order of their ends.

        Args:
            jobs: Handles or ids.

        Yields:
            Each job once, whether it succeeded or not; its `result()` answers, or
            raises, at once.
        """
        handles = (self.job(j) if isinstance(j, str) else j for j in jobs)
        return Completions(self._session, handles).iterate()

    def job(self, job_id: str) -> Job:
        """Returns a handle on a job that anyone submitted.

        Raises:
            UnknownJob: The text cannot be a job id.
        """
        return Job(self._session, JobId.parse(job_id))

    async def jobs(self, limit: int = 50, state: str | None = None) -> list[JobInfo]:
        """Returns the newest jobs of the pool, newest first.

        A record that cannot be read has the state `unreadable` and says its `problem`.

        Args:
            limit: Most jobs to return.
            state: Only jobs in this `State`, among the 10,000 newest.
        """
        return await recent_jobs(self._session, limit, state)

    async def models(self) -> list[ModelInfo]:
        """Returns the models that the pool knows, and how many workers serve each."""
        return await self._session.patiently(self._session.view.models)

    async def snapshot(self) -> PoolSnapshot:
        """Returns the pool at this moment: queues, workers, rates, latencies.

        Three round trips, and bounded however much waits.
        """
        return await snapshot(self._session)

    async def history(self, last: int = 360) -> list[HistorySample]:
        """Returns samples of the last hour, oldest first, one each ten seconds.

        Args:
            last: Most samples, the newest.
        """
        return await history(self._session, last)

    async def model_card(self, name: str) -> ModelCard | None:
        """Returns what workers say of a model; None when none has ever started."""
        return (await self._model(name)).card

    async def _model(self, name: str) -> ModelView:
        view = self._session.view
        return await self._session.patiently(lambda: view.model(name))

    async def _open_model(self, name: str) -> ModelView:
        view = self._session.view
        return await self._session.patiently(lambda: view.open_model(name))

    async def _require_served(
        self, jobs: Sequence[NewJob], when_unserved: WhenUnserved
    ) -> None:
        if when_unserved == "wait":
            return
        partitions: dict[str, set[int]] = {}
        for job in jobs:
            partitions.setdefault(job.id.model, set()).add(job.id.partition)
        view = self._session.view
        for name, wanted in partitions.items():
            await self._session.patiently(
                lambda: view.require_served(name, wanted)  # noqa: B023
            )
