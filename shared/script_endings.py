"""Results of jobs that no worker ends, built from what their records say."""

from typing import Final

import msgspec

from .errors import UnknownJob
from .keys import JobId
from .lifecycle import State
from .messages import (
    CANCELLED,
    Delta,
    End,
    JobError,
    JobResult,
    Timings,
    encode,
)

_MOST_DIGITS: Final = 15
"""Times with more are no milliseconds."""


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """A job's record as last read: which keys a script will need for it."""

    state: str = ""
    owner: str = ""
    entry_key: str = ""
    tenant: str = ""
    idem: str = ""
    cancel: str = ""
    epoch: str = ""
    alone: str = ""
    lease_losses: str = ""
    alone_losses: str = ""
    start_losses: str = ""
    lost: str = ""
    """What is known of the end of its group: see `forfeit.lua`."""
    enqueued_ms: str = ""
    started_ms: str = ""
    first_ms: str = ""
    now_ms: int = 0


def ending(
    job_id: str, state: str, error: JobError, hint: Hint | None = None
) -> tuple[bytes, bytes]:
    """Builds the result and the end marker of a job that no worker ends.

    Args:
        job_id: The job.
        state: Its terminal state.
        error: Why it did not succeed.
        hint: The job's times where known.

    Returns:
        JSON JobResult and JSON Delta.
    """
    try:
        model = JobId.parse(job_id).model
    except UnknownJob:  # a stranger's id: the result is recorded all the same
        model = ""
    result = JobResult(
        id=job_id, state=state, model=model, error=error, timings=_timings(hint)
    )
    return encode(result), encode(Delta(end=End(state=state, error=error)))


def cancelled(job_id: str, hint: Hint | None = None) -> tuple[bytes, bytes]:
    """Builds what `ending` does for a job that ends because someone asked for it."""
    return ending(job_id, State.CANCELLED, CANCELLED, hint)


def moment(value: str) -> int | None:
    """Returns milliseconds as a record names them; None for what is no time."""
    good = value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS
    return int(value) if good else None


def _timings(hint: Hint | None) -> Timings:
    enqueued = None if hint is None else moment(hint.enqueued_ms)
    if hint is None or enqueued is None:
        return Timings()

    def since(value: str) -> float | None:
        reached = moment(value)
        return None if reached is None else float(reached - enqueued)

    return Timings(
        queued_ms=since(hint.started_ms),
        ttft_ms=since(hint.first_ms),
        total_ms=float(hint.now_ms - enqueued) if hint.now_ms else None,
    )
