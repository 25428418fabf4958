"""What goes wrong with one item, as its outcome says it: the others go on."""

import structlog

from ...shared.errors import InvalidRequest, ProtocolError, TokenmillError
from ...shared.messages import JobError

_log = structlog.get_logger(__name__)


def as_job_error(error: Exception, *, run: str, seq: int) -> JobError:
    """Returns an error as an outcome carries it.

    Errors that a repeat may cure, as those of Redis, are for the caller to let through.

    Args:
        error: What was raised while something was done for one item.
        run: Its run.
        seq: The item.
    """
    if isinstance(error, InvalidRequest):
        return JobError(error.code, error.problem, error.field)
    if isinstance(error, ProtocolError):
        return JobError(error.code, str(error))
    # Raised again it would end every pass of the run in the same place, for ever.
    _log.error("bulk_item_fault", run=run, seq=seq, exc_info=error)
    code = error.code if isinstance(error, TokenmillError) else "internal_error"
    return JobError(
        code,
        f"tokenmill failed at this item ({type(error).__name__}); the janitor's log "
        f"has more under run {run}, seq {seq}. Please report it, then retry the item",
    )
