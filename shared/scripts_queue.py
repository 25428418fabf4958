"""Scripts that clients use: enqueue, cancel, and reading a job's record."""

from collections.abc import Sequence
from typing import Final, cast

import msgspec
from redis.exceptions import ResponseError

from .errors import ProtocolError
from .keys import lane_of
from .lifecycle import State
from .redis import translate
from .script_endings import cancelled
from .script_runner import (
    LOOKUPS,
    Argument,
    ScriptRunner,
    chunks,
    number,
    text,
)
from .script_types import CancelStatus, EnqueueReply, EnqueueStatus, Limits, NewJob


class _Facts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One job as `enqueue.lua` takes it; the defaults are the script's."""

    id: str
    hash: str
    class_: str = msgspec.field(default="interactive", name="class")
    tenant: str = "default"
    priority: int = 0
    bucket: str
    lane: int
    tokens: int
    max_tokens: int
    seed: str
    deadline_ms: int | None = None
    delay_ms: int = 0
    not_before_ms: int | None = None
    keep_ms: int = 3_600_000
    idempotency_key: str | None = None
    refuse_late: bool = False
    webhook: str | None = None
    version: str | None = None
    adapter: str | None = None
    v: int = 1


_encode: Final = msgspec.json.Encoder().encode


class QueueScripts(ScriptRunner):
    """The producer's side of the protocol."""

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[EnqueueReply]:
        """Records jobs. Safe to repeat with the same ids.

        Args:
            jobs: Jobs of this shard; large lists are sent in chunks.

        Returns:
            One reply for each job, in order.

        Raises:
            RedisUnavailable: No answer in time; some chunks may be recorded.
            RedisUnsuitable: The server refuses writes.
        """
        if not jobs:
            return []
        await self.register_shard()
        replies: list[EnqueueReply] = []
        for chunk in chunks(jobs, lambda job: len(job.payload)):
            replies += await self._enqueue(chunk)
        return replies

    async def _enqueue(self, jobs: Sequence[NewJob]) -> list[EnqueueReply]:
        k = self._keys
        keys = [k.load, k.lanes, k.recent, k.deadline, k.delayed, k.bell]
        keys += [k.limits, k.rates]
        args: list[Argument] = [len(jobs)]
        for job in jobs:
            facts = _facts(job)
            record, idem = k.job(facts.id), job.idempotency_key
            keys += (
                record,
                k.input(facts.id),
                k.queue(job.job_class, job.bucket, facts.lane),
                k.idempotency(job.tenant, idem) if idem else record,
            )
            args += (_encode(facts), job.payload)
        if any(job.webhook is not None for job in jobs):
            keys.append(k.webhooks)
        flat = await self.run_list("enqueue", keys, args)
        return [
            _reply(*four)
            for four in zip(flat[0::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
        ]

    async def write_limits(self, limits: Limits) -> bool:
        """Writes what may wait in this shard, where it differs from what stands there.

        Args:
            limits: All of them; what they do not name is removed.

        Returns:
            Whether anything was written.
        """
        key = self._keys.limits
        wanted = {name: str(value) for name, value in limits.fields().items()}
        if await self._fields(key) == wanted:
            return False
        with translate():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(key)
                pipe.hset(key, mapping=dict(wanted))
                await pipe.execute()
        return True

    async def _fields(self, key: str) -> dict[str, str]:
        """Returns a hash; a stranger's key of another type reads as empty."""
        with translate():
            pipe = self._redis.pipeline(transaction=False)
            pipe.hgetall(key)
            (found,) = await pipe.execute(raise_on_error=False)
            if isinstance(found, ResponseError) and "WRONGTYPE" in str(found):
                return {}
            if isinstance(found, Exception):
                raise found
        return {text(name): text(value) for name, value in found.items()}

    async def cancel(self, job_id: str) -> CancelStatus:
        """Asks for a job's end.

        Args:
            job_id: A job of this shard.

        Returns:
            `cancelled`: ended now. `cancelling`: its worker has been told. A terminal
            state: it had ended before. `unknown`: there is no such job.
        """
        k = self._keys
        for _ in range(LOOKUPS):
            (hint,) = await self.hints([job_id])
            if not hint.state:
                return "unknown"
            job_keys = self.job_keys(job_id, hint.tenant, hint.idem)
            keys = [
                *(k.lease, k.deadline, k.delayed, k.load, k.lanes, k.done, k.bell),
                k.resume,
                k.group(hint.owner) if hint.owner else job_keys[0],
                k.control(hint.owner) if hint.owner else job_keys[0],
                hint.entry_key or job_keys[0],
                *job_keys,
                k.usage,
            ]
            args: list[Argument] = [job_id, hint.owner, hint.entry_key]
            args += cancelled(job_id, hint)
            status = text(await self.run("cancel", keys, args))
            if status == "keys":
                continue
            if status in ("cancelled", "cancelling", "unknown"):
                # A job that was cancelled before reads the same as one ended now.
                return cast("CancelStatus", status)
            return State(status)
        raise ProtocolError(
            f"job {job_id} changed hands {LOOKUPS} times while it was being cancelled; "
            "ask again"
        )

    async def job(self, job_id: str) -> dict[str, str] | None:
        """Returns a job's record, or None when there is none (any more)."""
        with translate():
            record = await cast(
                "object",
                self._redis.hgetall(self._keys.job(job_id)),  # type: ignore[misc]
            )
        fields = cast("dict[bytes, bytes]", record)
        return {text(name): text(value) for name, value in fields.items()} or None

    async def load(self) -> dict[str, str]:
        """Returns the counters of waiting work: see `Keys.load`."""
        return await self._fields(self._keys.load)


def _facts(job: NewJob) -> _Facts:
    return _Facts(
        id=str(job.id),
        hash=job.payload_hash,
        class_=job.job_class,
        tenant=job.tenant,
        priority=job.priority,
        bucket=job.bucket,
        lane=lane_of(job.tenant),
        tokens=job.tokens,
        max_tokens=job.max_tokens,
        seed=str(job.seed),
        deadline_ms=job.deadline_ms,
        delay_ms=job.delay_ms,
        not_before_ms=job.not_before_ms,
        keep_ms=job.keep_ms,
        idempotency_key=job.idempotency_key,
        refuse_late=job.refuse_late,
        webhook=job.webhook,
        version=job.version,
        adapter=job.adapter,
        v=job.v,
    )


def _reply(status: object, job_id: object, ms: object, detail: object) -> EnqueueReply:
    name, seconds = text(status), number(ms) / 1000 if ms else None
    late = name == "late"
    return EnqueueReply(
        status=cast("EnqueueStatus", name),
        job_id=text(job_id),
        retry_after_s=None if late else seconds,
        detail=text(detail),
        needed_s=seconds if late else None,
    )
