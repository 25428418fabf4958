"""The jobs of one request of OpenAI's form: wait for them, follow them, cancel them.

A client that leaves cancels its jobs, whether it waits or streams, unless it asked to
keep them; so does a request that takes too long, or that the gateway's end cuts off.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import structlog
from fastapi import Request

from ...shared.messages import Delta, End, JobResult
from ...shared.tasks import end_tasks
from ..job import Job
from ..openai_form import Spell
from .errors import ApiError
from .leaving import unless_left
from .sse import ENDED, going_down, too_slow

if TYPE_CHECKING:
    from .context import Gateway

JOB_HEADER: Final = "X-Tokenmill-Job"
MOST_IDS: Final = 16
"""Job ids in the header; those of a request with more prompts would not fit."""
_CLIENT_CLOSED: Final = 499
_log = structlog.get_logger(__name__)


class Running:
    """The jobs of one request.

    Args:
        owner: The gateway.
        jobs: In the order of the prompts.
        keep: A client that leaves does not cancel them.
        version: Of the model's weights, where known.
        spell: Bytes of a token id, where log probabilities were asked for.
    """

    def __init__(
        self,
        owner: "Gateway",
        jobs: Sequence[Job],
        *,
        keep: bool,
        version: str | None,
        spell: Spell | None,
    ) -> None:
        self._owner = owner
        self._keep = keep
        self.jobs = jobs
        self.version = version
        self.spell = spell
        self.created = int(time.time())
        self.ends: dict[int, End] = {}
        """Position of a job -> how it ended; filled by `deltas`."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: which jobs these are."""
        ids = [job.id for job in self.jobs[:MOST_IDS]]
        return {JOB_HEADER: ", ".join(ids)}

    async def results(self, request: Request) -> list[JobResult]:
        """Waits for all jobs on behalf of a client.

        Raises:
            TokenmillError: A job did not succeed.
            ApiError: The client left, or the request's time or the gateway's is up.
        """
        work = asyncio.create_task(self._all_results())
        how = "failed"
        try:
            how = await unless_left(self._owner, request.receive, work)
            if how == "done":
                return await work
        finally:
            request.scope[ENDED] = how
            await end_tasks(work)
            await self.leave()
        if how == "client_left":
            raise ApiError(
                _CLIENT_CLOSED, "the client left", code="client_closed_request"
            )
        limit_s = self._owner.config.gateway.request_timeout_s
        raise going_down() if how == "shutting_down" else too_slow(limit_s)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields (position of the job, what is new of it), as it comes.

        Left early, it cancels what goes on, unless the jobs are to be kept.

        Raises:
            TokenmillError: A job did not succeed.
        """
        try:
            if len(self.jobs) == 1:
                async with aclosing(self._follow(0)) as followed:
                    async for delta in followed:
                        yield 0, delta
                return
            async with aclosing(self._merged()) as merged:
                async for index, delta in merged:
                    yield index, delta
        finally:
            await self.leave()

    async def leave(self) -> None:
        """Cancels the jobs that go on, unless they are to be kept."""
        if self._keep:
            return
        # Handles know of ends that were seen; the others are asked to stop.
        going = [
            job
            for index, job in enumerate(self.jobs)
            if index not in self.ends and job.outcome is None
        ]
        answers = await asyncio.gather(
            *(job.cancel() for job in going), return_exceptions=True
        )
        for job, answer in zip(going, answers, strict=True):
            if isinstance(answer, BaseException):
                _log.warning("cancel_failed", job=job.id, kind=type(answer).__name__)

    async def _follow(self, index: int) -> AsyncGenerator[Delta, None]:
        async with self.jobs[index].stream() as stream:
            try:
                async for delta in stream:
                    yield delta
            finally:
                if stream.end is not None:
                    self.ends[index] = stream.end

    async def _all_results(self) -> list[JobResult]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(job.result()) for job in self.jobs]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _merged(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Several streams as one. A caller that is slow holds all of them back."""
        news: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue(len(self.jobs))

        async def pass_on(index: int) -> None:
            async with aclosing(self._follow(index)) as followed:
                async for delta in followed:
                    await news.put((index, delta))

        async def run_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for index in range(len(self.jobs)):
                        group.create_task(pass_on(index))
            except BaseExceptionGroup as errors:
                await news.put(None)
                raise errors.exceptions[0] from None
            await news.put(None)

        work = asyncio.create_task(run_all())
        try:
            while (one := await news.get()) is not None:
                yield one
            await work
        finally:
            await end_tasks(work)
