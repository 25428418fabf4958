"""What can be seen of jobs and models: plain records for callers and the command."""

from typing import Final

import msgspec

from ..shared.errors import ProtocolError
from ..shared.keys import JobId
from ..shared.messages import ModelCard

UNREADABLE: Final = "unreadable"
"""Stands for the state of a job whose record is not in our format."""


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A job's record at one moment. Times are milliseconds of Redis' clock."""

    id: str
    model: str
    state: str
    job_class: str
    tenant: str
    priority: int = 0
    version: str | None = None
    """Of the model, that serves or served it; None before its first token."""
    pinned_version: str | None = None
    """The only one that may run it."""
    adapter: str | None = None
    """Name of the LoRA adapter that it asks for."""
    bucket: str = ""
    prompt_tokens: int = 0
    """An estimate until the job is dispatched, exact from then on."""
    max_tokens: int = 0
    seed: int = 0
    epoch: int = 0
    """How often it was given to a worker or taken away."""
    owner: str | None = None
    """The worker group that holds it."""
    attempts: int = 0
    lease_losses: int = 0
    cancel_requested: bool = False
    idempotency_key: str | None = None
    enqueued_ms: int | None = None
    dispatched_ms: int | None = None
    started_ms: int | None = None
    first_token_ms: int | None = None
    finished_ms: int | None = None
    deadline_ms: int | None = None
    last_error: str | None = None
    problem: str | None = None
    """What is wrong with a record whose state is `UNREADABLE`."""

    @classmethod
    def unreadable(cls, job_id: str, problem: str) -> "JobInfo":
        """Stands in a list for a record that cannot be read."""
        return cls(
            id=job_id,
            model="",
            state=UNREADABLE,
            job_class="",
            tenant="",
            problem=problem,
        )

    @classmethod
    def from_record(cls, job_id: str, record: dict[str, str]) -> "JobInfo":
        """Reads the fields of `job:<id>`.

        Raises:
            UnknownJob: The id cannot be one.
            ProtocolError: A field is not in our format; the message names it.
        """
        return cls(
            id=job_id,
            model=JobId.parse(job_id).model,
            state=record.get("state", "unknown"),
            job_class=record.get("class", ""),
            tenant=record.get("tenant", ""),
            priority=_integer(record, "priority") or 0,
            version=record.get("served") or None,
            pinned_version=record.get("version") or None,
            adapter=record.get("adapter") or None,
            bucket=record.get("bucket", ""),
            prompt_tokens=_integer(record, "tokens") or 0,
            max_tokens=_integer(record, "max_tokens") or 0,
            seed=_integer(record, "seed") or 0,
            epoch=_integer(record, "epoch") or 0,
            owner=record.get("owner") or None,
            attempts=_integer(record, "attempts") or 0,
            lease_losses=_integer(record, "lease_losses") or 0,
            cancel_requested=record.get("cancel") == "1",
            idempotency_key=record.get("idem") or None,
            enqueued_ms=_integer(record, "enqueued_ms"),
            dispatched_ms=_integer(record, "dispatched_ms"),
            started_ms=_integer(record, "started_ms"),
            first_token_ms=_integer(record, "first_ms"),
            finished_ms=_integer(record, "finished_ms"),
            deadline_ms=_integer(record, "deadline"),
            last_error=record.get("last_error") or None,
        )


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the pool knows, and who serves it now."""

    name: str
    num_groups: int
    """Live worker groups over all partitions; 0 means that jobs would wait."""
    configured: bool
    """Whether the pool's settings name it."""
    card: ModelCard | None = None
    """What its workers say of it; None when none has ever started."""


def _integer(record: dict[str, str], field: str) -> int | None:
    """A number that scripts may have written as a float; None when absent."""
    text = record.get(field)
    if not text:
        return None
    try:
        try:
            return int(text)
        except ValueError:
            return int(float(text))
    except (ValueError, OverflowError):
        raise ProtocolError(
            f"the job's record cannot be read: its field '{field}' is "
            f"{text[:40]!r}, expected a number"
        ) from None
