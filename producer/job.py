"""A handle on one job: await it, follow it, cancel it, look at it."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..shared.errors import JobFailed, ResultTimeout, TokenmillError
from ..shared.keys import JobId, Keys
from ..shared.messages import JobResult
from .assembler import Position
from .inbox import SILENCE_S, EndInbox
from .info import JobInfo
from .outcome import failure, unknown_job
from .standing import info_of, look_at
from .stream import TokenStream

if TYPE_CHECKING:
    from .session import Session


class Job:
    """One job of the pool, made by `Client.submit` or from its id by `Client.job`.

    Args:
        session: The client's connections.
        job_id: The job.
        duplicate: The idempotency key was known, so this is the earlier job.
    """

    __slots__ = ("_id", "_outcome", "_session", "duplicate", "id", "shard")

    def __init__(
        self, session: "Session", job_id: JobId, *, duplicate: bool = False
    ) -> None:
        self._session = session
        self._id = job_id
        self.id = str(job_id)
        self.shard: Keys = job_id.keys
        """Names in Redis of the shard that holds it."""
        self.duplicate = duplicate
        self._outcome: JobResult | TokenmillError | None = None

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    @property
    def model(self) -> str:
        """Public name of the model that serves it."""
        return self._id.model

    async def result(self, timeout: float | None = None) -> JobResult:  # noqa: ASYNC109
        """Waits for the end and returns the result.

        Args:
            timeout: Seconds to wait; None waits for ever. The job goes on after it.

        Raises:
            JobFailed: It failed; `JobCancelled` and `JobExpired` are kinds of it.
            ResultTimeout: It was not done in time.
            UnknownJob: There is no record of it.
            RedisUnavailable: Redis did not answer for longer than the patience.
        """
        if self._outcome is None:
            try:
                async with asyncio.timeout(timeout):
                    self._outcome = await self._wait()
            except TimeoutError:
                raise ResultTimeout(
                    f"job {self.id} was not done after {timeout} s; it goes on"
                ) from None
        return self._settled(self._outcome)

    async def done(self) -> bool:
        """Whether the job has ended, well or not.

        Raises:
            UnknownJob: There is no record of it.
        """
        if self._outcome is None:
            self._outcome = await self._look()
        return self._outcome is not None

    def stream(
        self,
        from_offset: int = 0,
        *,
        positions: Mapping[int, Position] | None = None,
        cancel_on_leave: bool = False,
    ) -> TokenStream:
        """Follows the output: what was emitted so far, then live.

        Args:
            from_offset: First token wanted, for every choice. The first delta is the
                one that contains it; its `offset` says where that delta begins.
            positions: Choice -> how far an earlier stream was read: what came after
                it is given, from the log or from the result, and nothing twice.
            cancel_on_leave: Cancel the job when the iteration is left early.

        Returns:
            An async iterator of `Delta`. It raises `JobFailed` and its kinds after
            the last delta of a job that did not succeed; `stream.end` has the details.
        """
        return TokenStream(
            self._session,
            self._id,
            from_offset=from_offset,
            positions=positions,
            cancel_on_leave=cancel_on_leave,
        )

    async def cancel(self) -> str:
        """Asks for the job to stop.

        Returns:
            `cancelled` when it was still waiting, `cancelling` when a worker is to
            stop it, or the terminal state that it had reached before.

        Raises:
            UnknownJob: There is no record of it.
        """
        scripts = self._session.scripts(self.shard)
        answer = await self._session.patiently(lambda: scripts.cancel(self.id))
        if answer == "unknown":
            raise unknown_job(self.id)
        return answer

    async def info(self) -> JobInfo:
        """Returns the job's record as it is now.

        Raises:
            UnknownJob: There is no record of it.
            ProtocolError: The record is not in our format.
        """
        return await info_of(self._session, self._id)

    @property
    def job_id(self) -> JobId:
        """The id, taken apart."""
        return self._id

    @property
    def outcome(self) -> JobResult | None:
        """The recorded result, good or bad, where this handle has seen it."""
        return self._outcome if isinstance(self._outcome, JobResult) else None

    def settle(self, outcome: JobResult | TokenmillError) -> None:
        """Keeps how the job ended, so that `result` answers at once."""
        self._outcome = outcome

    def _settled(self, outcome: JobResult | TokenmillError) -> JobResult:
        if isinstance(outcome, TokenmillError):
            raise outcome
        error: JobFailed | None = failure(self.id, outcome.state, outcome.error)
        if error is not None:
            raise error
        return outcome

    async def _look(self) -> JobResult | None:
        (standing,) = await look_at(self._session, [self._id])
        if isinstance(standing, TokenmillError):
            raise standing
        return standing

    async def _wait(self) -> JobResult:
        # Subscribe first and look second: an end in between is seen either way.
        inbox = EndInbox()
        channel = self.shard.wake(self.id).encode()
        await self._session.subscribe([channel], inbox)
        try:
            while True:
                result = await self._look()
                if result is not None:
                    return result
                await inbox.take(SILENCE_S)
        finally:
            self._session.listener.unsubscribe([channel], inbox)
