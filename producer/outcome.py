"""How a job ended, as the caller sees it: a result, or the error that says why not."""

from typing import Final

import msgspec

from ..shared.errors import (
    JobCancelled,
    JobExpired,
    JobFailed,
    ProtocolError,
    TokenmillError,
    UnknownJob,
)
from ..shared.lifecycle import TERMINAL, State
from ..shared.messages import SCHEMA_VERSION, Delta, JobError, JobResult

_result_decoder: Final = msgspec.json.Decoder(JobResult)
_delta_decoder: Final = msgspec.json.Decoder(Delta)


def decode_result(raw: bytes) -> JobResult:
    """Returns the `JobResult` that stands in `out:<id>`.

    Raises:
        ProtocolError: It is not one, or of a later version.
    """
    try:
        result = _result_decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a result in Redis cannot be read: {error}") from error
    if result.v > SCHEMA_VERSION:
        raise ProtocolError(
            f"job {result.id}: the result has schema version {result.v}; this client "
            f"reads up to {SCHEMA_VERSION}: upgrade tokenmill here"
        )
    return result


def decode_delta(raw: bytes) -> Delta:
    """Returns the `Delta` in a log entry or a message.

    Raises:
        ProtocolError: It is not one.
    """
    try:
        return _delta_decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a delta in Redis cannot be read: {error}") from error


def failure(job_id: str, state: str, error: JobError | None) -> JobFailed | None:
    """Returns the exception for a terminal state, or None for a success.

    Args:
        job_id: The job.
        state: A terminal `State`.
        error: What was recorded, if anything.
    """
    if state == State.SUCCEEDED:
        return None
    code = error.code if error else state
    message = error.message if error else f"the job ended as {state}"
    kind: type[JobFailed] = JobFailed
    if state == State.CANCELLED:
        kind = JobCancelled
    elif state == State.EXPIRED:
        kind = JobExpired
    return kind(job_id, code, message, error.field if error else None)


def unknown_job(job_id: str) -> UnknownJob:
    """Returns the error for an id of which Redis knows nothing."""
    return UnknownJob(
        f"no record of job {job_id}: it was never enqueued in this pool, or its "
        "retention has passed"
    )


def unending(job_id: str, state: bytes | None) -> TokenmillError | None:
    """Returns why a job without a result will never have one, or None if it may.

    Args:
        job_id: The job.
        state: That of its record, read before its result was looked for.
    """
    if state is None:
        return unknown_job(job_id)
    if state.decode(errors="replace") in TERMINAL:
        # Only a foreign script could end a job without a result.
        return ProtocolError(
            f"job {job_id} is {state.decode()} and has no result in Redis"
        )
    return None
