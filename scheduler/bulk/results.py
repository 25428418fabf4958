"""How jobs ended, read in one round trip, and letting go of what is recorded."""

from collections.abc import Sequence
from typing import Final

import msgspec
import redis.asyncio
import structlog

from ...shared.keys import JobId
from ...shared.lifecycle import TERMINAL, State
from ...shared.messages import SCHEMA_VERSION, JobError, JobResult
from ...shared.redis import translate
from ...shared.script_runner import text

RECORDED_MS: Final = 60_000
"""How long a job's keys stay once its outcome stands in the run: a run of a million
must not fill Redis with jobs that nobody will ask for."""
_decoder: Final = msgspec.json.Decoder(JobResult)
_log = structlog.get_logger(__name__)


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """One job as it stands."""

    job_id: str
    state: str
    """Empty when there is no such job."""
    result: JobResult | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended."""
        return self.state in TERMINAL

    @property
    def error(self) -> JobError | None:
        """Why it did not succeed."""
        if self.state == State.SUCCEEDED and self.result is not None:
            return None
        if self.result is not None and self.result.error is not None:
            return self.result.error
        return JobError(
            "protocol_error", f"job {self.job_id} is {self.state} without a result"
        )


async def states(client: "redis.asyncio.Redis", job_ids: Sequence[str]) -> list[str]:
    """Returns the state of each job; empty for one that is unknown.

    Args:
        client: Redis.
        job_ids: Jobs of any shards.
    """
    if not job_ids:
        return []
    pipe = client.pipeline(transaction=False)
    for job_id in job_ids:
        pipe.hget(JobId.parse(job_id).keys.job(job_id), "state")
    with translate():
        found = await pipe.execute(raise_on_error=False)
    return [text(one) if isinstance(one, bytes) else "" for one in found]


async def read_ended(
    client: "redis.asyncio.Redis", job_ids: Sequence[str]
) -> list[Ended]:
    """Returns how each of these jobs stands, with its result where it has one."""
    known = await states(client, job_ids)
    done = [i for i, s in zip(job_ids, known, strict=True) if s in TERMINAL]
    pipe = client.pipeline(transaction=False)
    for job_id in done:
        pipe.get(JobId.parse(job_id).keys.output(job_id))
    with translate():
        raw = await pipe.execute(raise_on_error=False) if done else []
    results = dict(zip(done, map(_decoded, raw), strict=True))
    return [
        Ended(job_id=job_id, state=state, result=results.get(job_id))
        for job_id, state in zip(job_ids, known, strict=True)
    ]


def _decoded(raw: object) -> JobResult | None:
    if not isinstance(raw, bytes):
        return None
    try:
        result = _decoder.decode(raw)
    except msgspec.DecodeError as error:
        _log.warning("result_unreadable", error=str(error))
        return None
    if result.v > SCHEMA_VERSION:
        _log.warning("result_of_a_newer_version", job=result.id, version=result.v)
        return None
    return result


async def let_go(
    client: "redis.asyncio.Redis", ended: Sequence[Ended], keep_ms: int
) -> None:
    """Shortens the life of jobs whose outcome is recorded.

    Dead letters keep theirs: people look at them.

    Args:
        client: Redis.
        ended: Jobs that are terminal.
        keep_ms: How long the jobs of runs stay after their end; dead letters stay
            longer, by which they are known.
    """
    names = [_keys_of(one.job_id) for one in ended if one.is_terminal]
    if not names:
        return
    pipe = client.pipeline(transaction=False)
    for keys in names:
        pipe.pttl(keys[0])
    with translate():
        left = await pipe.execute()
    pipe = client.pipeline(transaction=False)
    for keys, left_ms in zip(names, left, strict=True):
        if RECORDED_MS < left_ms <= keep_ms:
            for key in keys:
                pipe.pexpire(key, RECORDED_MS)
    with translate():
        await pipe.execute(raise_on_error=False)


def _keys_of(job_id: str) -> tuple[str, ...]:
    """Names of everything of one job, its record first."""
    keys = JobId.parse(job_id).keys
    kinds = (keys.job, keys.input, keys.ids, keys.output, keys.log)
    return tuple(name(job_id) for name in kinds)
