"""Where jobs stand: ended, going on, or never to end. No odd record spoils another."""

from collections.abc import Sequence

import msgspec

from ..shared.errors import ProtocolError, TokenmillError
from ..shared.keys import JobId
from ..shared.messages import AdapterRef, JobResult
from .info import JobInfo
from .listing import as_text
from .outcome import decode_result, unending, unknown_job
from .session import Session


async def look_at(
    session: Session, jobs: Sequence[JobId]
) -> list[JobResult | TokenmillError | None]:
    """Looks for the results of jobs in one round trip.

    Args:
        session: The client's connections.
        jobs: Of one pool.

    Returns:
        For each its result; or the error that says why there will never be one; or
        None while it goes on.
    """
    commands: list[tuple[str, ...]] = []
    for job in jobs:
        name = str(job)
        # The state first: a terminal one then implies the result.
        commands.append(("HGET", job.keys.job(name), "state"))
        commands.append(("GET", job.keys.output(name)))
    replies = await session.read_each(*commands)
    states, results = replies[::2], replies[1::2]
    return [
        _standing(str(job), state, raw)
        for job, state, raw in zip(jobs, states, results, strict=True)
    ]


async def info_of(session: Session, job: JobId) -> JobInfo:
    """Returns a job's record as it is now.

    Raises:
        UnknownJob: There is no record of it.
        ProtocolError: The record is not in our format; the message says what is wrong.
    """
    name = str(job)
    (record,) = await session.read(("HGETALL", job.keys.job(name)))
    if not record:
        raise unknown_job(name)
    return JobInfo.from_record(name, as_text(record))


class _Asked(msgspec.Struct):
    """What is looked for in `in:<id>`, whatever else is there."""

    adapter: AdapterRef | None = None


async def adapter_of(session: Session, job: JobId) -> AdapterRef | None:
    """Returns the adapter that a job asks for; None without one.

    Records have its name alone, so the request is read, as long as it is kept.
    """
    (raw,) = await session.read(("GET", job.keys.input(str(job))))
    try:
        return None if raw is None else msgspec.json.decode(raw, type=_Asked).adapter
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # its worker will say what is wrong


def settled_by(raw: bytes) -> JobResult | ProtocolError:
    """Returns what `out:<id>` says, or the error if it cannot be read."""
    try:
        return decode_result(raw)
    except ProtocolError as error:
        return error


def _standing(
    job_id: str, state: bytes | ProtocolError | None, raw: bytes | ProtocolError | None
) -> JobResult | TokenmillError | None:
    if isinstance(raw, ProtocolError):
        return raw
    if raw is not None:
        return settled_by(raw)
    if isinstance(state, ProtocolError):
        return state
    return unending(job_id, state)
