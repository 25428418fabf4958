"""Ending jobs that can never run, and burying entries that are no jobs."""

import structlog

from ..shared.errors import InvalidRequest, ProtocolError, TokenmillError, UnknownJob
from ..shared.keys import JobId
from ..shared.messages import Delta, End, JobError, JobResult, encode
from ..shared.scripts import Scripts

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
    message = error.problem if isinstance(error, InvalidRequest) else str(error)
    recorded = JobError(error.code, message, field)
    try:
        model = JobId.parse(job_id).model
    except UnknownJob:  # a stranger's id; the result is recorded all the same
        model = ""
    result = JobResult(id=job_id, state="failed", model=model, error=recorded)
    return encode(result), encode(Delta(end=End(state="failed", error=recorded)))


class Refuser:
    """Ends jobs on behalf of the active scheduler.

    Args:
        scripts: The shard's.
        fence: The active scheduler's number.
    """

    def __init__(self, scripts: Scripts, fence: int) -> None:
        self._scripts = scripts
        self._fence = fence

    async def fail(self, job_id: str, error: TokenmillError) -> bool:
        """Ends a queued job as failed; whether it was queued."""
        result, end = failure(job_id, error)
        done = await self._scripts.reject(
            fence=self._fence, job_id=job_id, state="failed", result=result, end=end
        )
        if done:
            _log.info(
                "job_rejected",
                job=job_id,
                code=error.code,
                field=getattr(error, "field", None),
            )
        return done

    async def bury(self, stream: str, entry_id: str, error: ProtocolError) -> None:
        """Moves an entry that cannot be understood to the dead letters."""
        await self._scripts.dead_letter(
            entry_key=stream, entry_id=entry_id, reason=str(error)
        )
        _log.warning("dead_letter", stream=stream, entry=entry_id, reason=str(error))
