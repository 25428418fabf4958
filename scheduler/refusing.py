"""Ending jobs that can never run, and burying entries that are no jobs."""

import structlog

from ..shared.errors import (
    InvalidRequest,
    ProtocolError,
    RedisUnsuitable,
    TokenmillError,
)
from ..shared.messages import JobError
from ..shared.script_endings import ending
from ..shared.script_runner import broke_on_data
from ..shared.scripts import Scripts

Place = tuple[str, str]
"""A stream and the id of an entry in it."""
_log = structlog.get_logger(__name__)


def failure(job_id: str, error: TokenmillError) -> tuple[bytes, bytes]:
    """Returns the result and the end marker of a job that failed on its input.

    Args:
        job_id: The job.
        error: Why.

    Returns:
        JSON JobResult and JSON Delta.
    """
    field = error.field if isinstance(error, InvalidRequest) else None
    return ending(job_id, "failed", JobError(error.code, str(error), field))


class Refuser:
    """Ends jobs on behalf of the active scheduler.

    Nothing here raises for what one job's keys hold: the others must go on.

    Args:
        scripts: The shard's.
        fence: The active scheduler's number.
    """

    def __init__(self, scripts: Scripts, fence: int) -> None:
        self._scripts = scripts
        self._fence = fence

    async def fail(self, job_id: str, error: TokenmillError, entry: Place) -> bool:
        """Ends a queued job as failed; whether it was queued.

        Args:
            job_id: The job.
            error: Why.
            entry: Where its entry was read.
        """
        done = await self._reject(job_id, error, entry, own=False)
        if done is None:
            await self._dead_letter(entry, f"its job cannot be ended: {error}")
        return bool(done)

    async def bury(self, entry: Place, error: TokenmillError, job_id: str) -> None:
        """Moves an entry that cannot be understood to the dead letters.

        A job that waits with just this entry would wait for ever: it ends as failed.

        Args:
            entry: Where it was read.
            error: What is wrong with it.
            job_id: The job that it names, or nothing.
        """
        await self._dead_letter(entry, str(error))
        _log.warning("dead_letter", stream=entry[0], entry=entry[1], reason=str(error))
        if job_id:
            await self._reject(job_id, error, entry, own=True)

    async def _reject(
        self, job_id: str, error: TokenmillError, entry: Place, *, own: bool
    ) -> bool | None:
        """Whether the job has ended now; None where its record does not let it."""
        result, end = failure(job_id, error)
        try:
            done = await self._scripts.reject(
                fence=self._fence,
                job_id=job_id,
                state="failed",
                result=result,
                end=end,
                entry=entry if own else None,
            )
        except (RedisUnsuitable, ProtocolError) as problem:
            if isinstance(problem, RedisUnsuitable) and not broke_on_data(problem):
                raise
            _log.exception("job_cannot_be_ended", job=job_id)
            return None
        if done:
            _log.debug(
                "job_rejected",
                job=job_id,
                code=error.code,
                field=getattr(error, "field", None),
            )
        return done

    async def _dead_letter(self, entry: Place, reason: str) -> None:
        stream, entry_id = entry
        await self._scripts.dead_letter(
            entry_key=stream, entry_id=entry_id, reason=reason
        )
