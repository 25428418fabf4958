"""One dead letter: what is shown of it, and the job that it can become again."""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from ..shared.errors import ProtocolError, TokenmillError, UnknownJob
from ..shared.keys import JobId, Keys
from ..shared.messages import JobError
from ..shared.script_types import NewJob
from .info import JobInfo

if TYPE_CHECKING:
    from ..shared.scripts_dead import Letter

_DEFAULT_KEEP_MS: Final = 3_600_000
"""What a record that names none stands for."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job that failed for good, or a queue entry that nobody understood."""

    id: str
    """The job's; of an entry `<model>:<partition>/<stream id of the letter>`."""
    shard: str
    at_ms: int
    """When it was buried, by the clock of Redis."""
    reason: str
    """`lease_losses`, `start_losses` or `attempts` for a job; else what was wrong."""
    error: JobError | None = None
    """How the job failed last."""
    job: JobInfo | None = None
    """Its record; None when it has expired, or where there is no job."""
    requeued_as: str | None = None
    """The job that was made from it."""


class Requeued(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one letter that was to run again."""

    id: str
    """Of the letter."""
    job: str | None = None
    """The new job, also when an earlier requeue made it."""
    problem: str | None = None
    """Why there is none."""


def id_of(keys: Keys, letter: "Letter") -> str:
    """Returns the id by which a person names a letter."""
    return letter.job_id or f"{keys.shard}/{letter.entry}"


def shown(keys: Keys, letter: "Letter", record: dict[str, str]) -> DeadLetter:
    """Returns a letter with what the job's record says of it."""
    try:
        info = JobInfo.from_record(letter.job_id, record) if record else None
    except (ProtocolError, UnknownJob) as error:
        info = JobInfo.unreadable(letter.job_id, str(error))
    return DeadLetter(
        id=id_of(keys, letter),
        shard=keys.shard,
        at_ms=letter.at_ms,
        reason=letter.reason,
        error=_error(letter),
        job=info,
        requeued_as=record.get("requeued_as") or None,
    )


def _error(letter: "Letter") -> JobError:
    text = letter.error.decode(errors="replace")
    if not letter.job_id:
        return JobError("protocol_error", f"from {text}: {letter.reason}")
    try:
        return msgspec.json.decode(letter.error, type=JobError)
    except msgspec.MsgspecError:
        return JobError("unknown", text[:400])


def problem(error: Exception) -> str:
    """Says why a letter cannot become a job."""
    if isinstance(error, TokenmillError):
        return str(error)
    return f"its record is damaged ({error}); submit the job again"


def again(letter: "Letter", record: Mapping[str, str], payload: object) -> NewJob:
    """Returns the job that a dead one becomes.

    Args:
        letter: As it stands in Redis.
        record: The dead job's; empty when it has expired.
        payload: Its input, as bytes.

    Raises:
        TokenmillError: There is no job, or nothing is left of it.
        ValueError: Its record is damaged; likewise `KeyError`.
    """
    if not letter.job_id:
        raise TokenmillError("this entry was no job that could be understood; purge it")
    if not record or not isinstance(payload, bytes):
        raise TokenmillError(
            "its record or input has expired or was purged; submit it again"
        )
    old = JobId.parse(letter.job_id)
    unique = hashlib.sha256(f"requeued {old}".encode()).hexdigest()[:31]
    return NewJob(
        id=JobId(old.model, old.partition, unique),
        payload=payload,
        payload_hash=record["hash"],
        job_class=record["class"],
        tenant=record["tenant"],
        priority=int(record.get("priority") or 0),
        bucket=record["bucket"],
        tokens=max(int(record["tokens"]), 1),
        max_tokens=int(record["max_tokens"]),
        seed=int(record["seed"]),
        keep_ms=int(record.get("keep_ms") or _DEFAULT_KEEP_MS),
        version=record.get("version") or None,
        adapter=record.get("adapter") or None,
        v=int(record.get("v") or 1),
    )
