"""The end of a job here: which way it leaves, and with what."""

from enum import StrEnum
from typing import Final

from ..shared.messages import CANCELLED, EXPIRED, Choice, JobError, JobResult
from ..shared.script_types import FinishItem
from .jobs import RunningJob


class Way(StrEnum):
    """How a job leaves."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """Its own fault: never run again."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAULT = "fault"
    """Ours: run again while attempts are left."""
    RELEASE = "release"
    """Handed back at no cost, as when draining."""


RECORDED: Final = frozenset(Way) - {Way.FAULT, Way.RELEASE}
"""Ways that the finish script records."""
_ERRORS: Final = {Way.CANCELLED: CANCELLED, Way.EXPIRED: EXPIRED}
"""Why, where the way itself says it."""


class Ending:
    """The end of one job here, kept unchanged while it is being written.

    Args:
        job: The job.
        way: How it leaves.
        choices: Its complete output; None takes what was published so far.
        error: Why, when it failed; a cancelled or expired job has one of its own.
    """

    __slots__ = ("built", "choices", "error", "job", "way")

    def __init__(
        self,
        job: RunningJob,
        way: Way,
        *,
        choices: tuple[Choice, ...] | None = None,
        error: JobError | None = None,
    ) -> None:
        self.job = job
        self.way = way
        self.error = error or _ERRORS.get(way)
        self.choices = choices
        self.built: tuple[FinishItem, JobResult] | None = None
        """What is written, made once: a repeated call must not differ."""
