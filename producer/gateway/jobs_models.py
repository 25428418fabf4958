"""What /v1/jobs takes and answers."""

import datetime as dt
from typing import Final, Literal

import msgspec

from ...shared.messages import (
    AdapterRef,
    Choice,
    JobError,
    JobResult,
    Message,
    Sampling,
    Timings,
    Usage,
)
from ..info import JobInfo
from .options import QueueFields

MOST_LISTED: Final = 500
LONGEST_WAIT_S: Final = 60.0


class JobBody(QueueFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job to be queued: exactly one of `text` and `messages`. Fields of queueing
    have headers as well, which go before them.
    """

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    model: str | None = None
    """None is the pool's only model, or the default one."""
    adapter: str | None = None
    """A LoRA adapter of the model; the model `m:a` means the same."""
    sampling: Sampling = Sampling()
    control_tokens: Literal["refuse", "as_text", "allow"] = "refuse"
    """What to do where the text spells a control token."""
    tenant: str | None = None
    """Another tenant than the key's takes the scope admin."""
    delay_s: float = 0.0
    not_before: dt.datetime | None = None
    """With a time zone, by the clock of Redis; instead of `delay_s`."""
    refuse_late: bool = False
    """Refuse it now when it cannot meet its deadline."""
    version: str | None = None
    """Only this version of the model may run it."""
    wait_for_worker: bool = False
    """Queue it even if no worker serves the model now."""


class JobOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a job wrote."""

    text: str
    """Of the first choice."""
    choices: tuple[Choice, ...]
    adapter: AdapterRef | None = None
    """What the model ran with."""
    version: str | None = None
    """Of the model."""
    weights_version: str | None = None


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is now. Times are milliseconds of Redis' clock."""

    id: str
    object: Literal["job"] = "job"
    state: str
    """delayed, queued, dispatched, running, retrying, or one of the ends: succeeded,
    failed, cancelled, expired; unreadable when its record is damaged."""
    model: str
    job_class: str
    tenant: str
    priority: int
    version: str | None
    """Of the model, that serves or served it; null before its first token."""
    pinned_version: str | None
    """The only one that may run it."""
    adapter: str | None
    """Name of the LoRA adapter that it asks for."""
    prompt_tokens: int
    """An estimate until it is dispatched."""
    max_tokens: int
    seed: str
    """In digits: it may exceed what a number in JSON holds exactly."""
    attempts: int
    lease_losses: int
    cancel_requested: bool
    idempotency_key: str | None
    enqueued_ms: int | None
    dispatched_ms: int | None
    started_ms: int | None
    first_token_ms: int | None
    finished_ms: int | None
    deadline_ms: int | None
    usage: Usage | None
    """Once it has ended, as `timings`, `output` and `error`."""
    timings: Timings | None
    output: JobOutput | None
    error: JobError | None

    @classmethod
    def of(cls, info: JobInfo, result: JobResult | None = None) -> "JobView":
        """Shows a job's record, and its result where it has ended."""
        names = set(cls.__struct_fields__) & set(JobInfo.__struct_fields__)
        shared = {name: getattr(info, name) for name in names - {"seed", "version"}}
        served = result.version if result else None
        problem = info.problem or (info.last_error if result is None else None)
        error = None if problem is None else JobError("last_error", problem)
        return cls(
            **shared,
            seed=str(info.seed),
            version=served or info.version,
            usage=result.usage if result else None,
            timings=result.timings if result else None,
            output=_output(result),
            error=result.error if result else error,
        )


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs, newest first, a page of them."""

    object: Literal["list"] = "list"
    data: tuple[JobView, ...]
    cursor: str | None
    """For `after` of the next page; null: there are no more."""


class JobStopped(msgspec.Struct, frozen=True, kw_only=True):
    """What a cancel came to."""

    id: str
    object: Literal["job"] = "job"
    state: str
    """cancelled; cancelling: its worker was told; or the end that it had reached."""


class JobDelta(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream: new tokens of one choice."""

    choice: int = 0
    offset: int = 0
    """Index in the choice's output of the first token here."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None


def _output(result: JobResult | None) -> JobOutput | None:
    if result is None or not result.choices:
        return None
    return JobOutput(
        text=result.text,
        choices=result.choices,
        adapter=result.adapter,
        version=result.version,
        weights_version=result.weights_version,
    )


JobState = Literal[
    "delayed",
    "queued",
    "dispatched",
    "running",
    "retrying",
    "succeeded",
    "failed",
    "cancelled",
    "expired",
]
