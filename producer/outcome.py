"""How a job ended, as the caller sees it: a result, or the error that says why not."""

from typing import Final

import msgspec

from ..shared.errors import JobCancelled, JobExpired, JobFailed, ProtocolError
from ..shared.lifecycle import State
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
    return kind(job_id, code, message)
