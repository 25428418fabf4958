"""What the dashboard reads: the pool as one caller may see it.

Sums over the pool (queues, groups, rates) name nobody and are for everyone who may
look. What names a tenant, a job or a host is cut to the caller's own tenant.
"""

import msgspec

from ...shared.bulk.messages import RunView
from ...shared.messages import JobError, Usage
from ...shared.process_card import ProcessCard
from ...shared.watch.snapshot import (
    GroupStatus,
    HistorySample,
    Latency,
    QueueDepth,
    Rates,
    SchedulerStatus,
    Waiting,
)
from ..dead_letter import DeadLetter, Requeued
from ..info import JobInfo


class ModelChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the playground can ask."""

    name: str
    is_served: bool
    """Whether a worker of it is alive."""
    has_chat_template: bool
    """Whether it takes conversations; otherwise it goes on from a text."""


class Me(msgspec.Struct, frozen=True, kw_only=True):
    """Who is looking, and what for."""

    auth: str
    """`keys`, or `none` where nobody is asked for one."""
    tenant: str
    is_admin: bool
    """Whether every tenant is shown."""
    scopes: tuple[str, ...]
    models: tuple[ModelChoice, ...]


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A bulk run. Times are milliseconds of Redis' clock."""

    run: str
    kind: str
    tenant: str
    name: str
    input_label: str
    state: str
    total: int | None
    """Items of the input, once they are counted."""
    fed: int
    """Items that the run was given so far."""
    settled: int
    """Items that have ended, in whichever way."""
    succeeded: int
    failed: int
    cancelled: int
    refused: int
    """Lines of the input that were wrong and never became items; no other count has
    them."""
    jobs: int
    """Jobs that have ended."""
    prompt_tokens: int
    completion_tokens: int
    created_ms: int
    updated_ms: int
    driver_ms: int
    """Last sign of life of the command that feeds it."""
    now_ms: int

    @classmethod
    def of(cls, view: RunView) -> "RunRow":
        """Returns a row for a run."""
        return cls(
            run=view.run,
            kind=view.spec.kind,
            tenant=view.spec.tenant,
            name=view.spec.name,
            input_label=view.spec.input_label,
            state=view.state,
            total=view.total,
            fed=view.fed,
            settled=view.settled,
            succeeded=view.succeeded,
            failed=view.failed,
            cancelled=view.cancelled,
            refused=view.refused,
            jobs=view.jobs,
            prompt_tokens=view.prompt_tokens,
            completion_tokens=view.completion_tokens,
            created_ms=view.created_ms,
            updated_ms=view.updated_ms,
            driver_ms=view.driver_ms,
            now_ms=view.now_ms,
        )


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    """The pool at one moment, as one caller may see it."""

    at_ms: int
    buckets: tuple[str, ...]
    """Length buckets in order, `beyond` last."""
    queues: tuple[QueueDepth, ...]
    waiting_jobs: int
    waiting_tokens: int
    classes: tuple[Waiting, ...]
    tenants: tuple[Waiting, ...]
    """Without the scope `admin` the caller's alone."""
    delayed: int
    running: int
    groups: tuple[GroupStatus, ...]
    schedulers: tuple[SchedulerStatus, ...]
    dead_letters: int | None
    """None without the scope `admin`: the count is of all tenants."""
    processes: tuple[ProcessCard, ...]
    """Empty without the scope `admin`."""
    rates: Rates
    latency: Latency
    left_out: tuple[str, ...]
    recent: tuple[JobInfo, ...]
    """Newest jobs, newest first."""
    runs: tuple[RunRow, ...]
    """Newest bulk runs, newest first."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of the last hour, oldest first."""

    data: tuple[HistorySample, ...]


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs, newest first."""

    data: tuple[JobInfo, ...]
    more: bool
    """Whether there are others that fit."""


class JobDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One job: its record, and how it ended."""

    job: JobInfo
    seed: str
    """As text: a browser's numbers are too small for it."""
    error: JobError | None
    """What was recorded at its end."""
    usage: Usage | None
    """None until it has ended."""
    input: str | None
    """Its prompt, cut to some thousand characters; only its own tenant is shown it."""
    may_cancel: bool


class CancelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a cancel."""

    status: str
    """`cancelled`, `cancelling`, or the state in which it had ended before."""


class DeadRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job that failed for good, or an entry that nobody understood."""

    id: str
    is_job: bool
    """Whether its record is there still, so that it can run again."""
    at_ms: int
    reason: str
    error: JobError | None
    tenant: str
    job_class: str
    requeued_as: str | None

    @classmethod
    def of(cls, letter: DeadLetter) -> "DeadRow":
        """Returns a row for a letter."""
        job = letter.job
        return cls(
            id=letter.id,
            is_job=job is not None,
            at_ms=letter.at_ms,
            reason=letter.reason,
            error=letter.error,
            tenant=job.tenant if job is not None else "",
            job_class=job.job_class if job is not None else "",
            requeued_as=letter.requeued_as,
        )


class DeadPage(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters, newest first."""

    data: tuple[DeadRow, ...]
    total: int
    more: bool


class LettersNamed(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Which letters to act on: `ids`, or `all`."""

    ids: tuple[str, ...] = ()
    all: bool = False


class RequeueAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of each letter."""

    data: tuple[Requeued, ...]


class PurgeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How many letters were removed."""

    purged: int
