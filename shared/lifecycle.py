"""A job's life as one table: (state, event) -> state. No I/O.

This table is the only truth: the Lua scripts are held against it by tests, and the
diagram in docs/lifecycle.md is generated from it.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import Final

from .errors import IllegalTransition


class State(StrEnum):
    """Where a job is in its life."""

    DELAYED = "delayed"
    """Recorded, to be queued at a later time."""
    QUEUED = "queued"
    """In a bucket stream, waiting for the scheduler."""
    DISPATCHED = "dispatched"
    """Promised to one worker group, under a lease, not yet started."""
    RUNNING = "running"
    """A worker group holds it and its token log exists."""
    RETRYING = "retrying"
    """A fault occurred; it waits out a back-off before it is queued again."""
    SUCCEEDED = "succeeded"
    """Terminal: the result is recorded."""
    FAILED = "failed"
    """Terminal: bad input, faults beyond the attempts allowed, or workers lost."""
    CANCELLED = "cancelled"
    """Terminal: someone asked for it."""
    EXPIRED = "expired"
    """Terminal: its deadline passed."""


class Event(StrEnum):
    """What can happen to a job."""

    DUE = "due"
    """The delay or the back-off is over."""
    DISPATCH = "dispatch"
    """The scheduler gives it to a worker group."""
    START = "start"
    """The worker group takes it."""
    FINISH = "finish"
    """The worker group records its result."""
    FAULT = "fault"
    """An application fault with attempts left."""
    REJECT = "reject"
    """Bad input, no attempts left, or it took its worker along while it ran alone."""
    LEASE_LOST = "lease_lost"
    """The worker group stopped renewing; the job is redelivered."""
    RELEASE = "release"
    """A draining group, or one that cannot take it, hands it back at no cost."""
    CANCEL = "cancel"
    """A cancel takes effect (for a running job: when its group stops it)."""
    EXPIRE = "expire"
    """The deadline passed."""


_ = State
TRANSITIONS: Final = MappingProxyType(
    {
        (_.DELAYED, Event.DUE): _.QUEUED,
        (_.DELAYED, Event.CANCEL): _.CANCELLED,
        (_.DELAYED, Event.EXPIRE): _.EXPIRED,
        (_.QUEUED, Event.DISPATCH): _.DISPATCHED,
        (_.QUEUED, Event.REJECT): _.FAILED,
        (_.QUEUED, Event.CANCEL): _.CANCELLED,
        (_.QUEUED, Event.EXPIRE): _.EXPIRED,
        (_.DISPATCHED, Event.START): _.RUNNING,
        (_.DISPATCHED, Event.LEASE_LOST): _.QUEUED,
        (_.DISPATCHED, Event.RELEASE): _.QUEUED,
        (_.DISPATCHED, Event.REJECT): _.FAILED,
        (_.DISPATCHED, Event.CANCEL): _.CANCELLED,
        (_.DISPATCHED, Event.EXPIRE): _.EXPIRED,
        (_.RUNNING, Event.FINISH): _.SUCCEEDED,
        (_.RUNNING, Event.FAULT): _.RETRYING,
        (_.RUNNING, Event.REJECT): _.FAILED,
        (_.RUNNING, Event.LEASE_LOST): _.QUEUED,
        (_.RUNNING, Event.RELEASE): _.QUEUED,
        (_.RUNNING, Event.CANCEL): _.CANCELLED,
        (_.RUNNING, Event.EXPIRE): _.EXPIRED,
        (_.RETRYING, Event.DUE): _.QUEUED,
        (_.RETRYING, Event.CANCEL): _.CANCELLED,
        (_.RETRYING, Event.EXPIRE): _.EXPIRED,
    }
)
"""The whole life of a job. A pair that is not here is an error."""

WAITING: Final = frozenset({_.DELAYED, _.QUEUED, _.RETRYING})
"""Nobody holds the job."""
ACTIVE: Final = frozenset({_.DISPATCHED, _.RUNNING})
"""A worker group holds the job under a lease."""
TERMINAL: Final = frozenset({_.SUCCEEDED, _.FAILED, _.CANCELLED, _.EXPIRED})
"""The job never changes again."""


def after(state: State, event: Event) -> State:
    """Returns the state that follows `event` in `state`.

    Args:
        state: The job's present state.
        event: What happened.

    Returns:
        The next state.

    Raises:
        IllegalTransition: The table has no such pair.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        allowed = sorted(e.value for s, e in TRANSITIONS if s is state) or ["none"]
        raise IllegalTransition(
            f"event '{event}' is not allowed in state '{state}'; "
            f"allowed there: {', '.join(allowed)}"
        ) from None


def mermaid() -> str:
    """Returns the table as a Mermaid state diagram, in a stable order."""
    lines = ["stateDiagram-v2", "    [*] --> queued: enqueue"]
    lines.append("    [*] --> delayed: enqueue with a delay")
    lines += [f"    {s} --> {t}: {e}" for (s, e), t in TRANSITIONS.items()]
    lines += [f"    {s} --> [*]" for s in State if s in TERMINAL]
    return "\n".join(lines)
