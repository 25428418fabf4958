"""Scripts that clients use: enqueue, cancel, and reading a job's record."""

from collections.abc import Sequence
from typing import cast

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


class QueueScripts(ScriptRunner):
    """The producer's side of the protocol."""

    async def enqueue(
        self, jobs: Sequence[NewJob], limits: Limits
    ) -> list[EnqueueReply]:
        """Records jobs. Safe to repeat with the same ids.

        Args:
            jobs: Jobs of this shard; large lists are sent in chunks.
            limits: How much may wait.

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
            replies += await self._enqueue(chunk, limits)
        return replies

    async def _enqueue(
        self, jobs: Sequence[NewJob], limits: Limits
    ) -> list[EnqueueReply]:
        k = self._keys
        keys = [k.load, k.lanes, k.recent, k.deadline, k.delayed, k.bell]
        args: list[Argument] = [
            limits.max_waiting_jobs,
            limits.max_waiting_tokens,
            limits.tenant_waiting_jobs,
            len(jobs),
        ]
        for job in jobs:
            job_id, idem = str(job.id), job.idempotency_key or ""
            lane = lane_of(job.tenant)
            record = k.job(job_id)
            keys += (
                record,
                k.input(job_id),
                k.queue(job.job_class, job.bucket, lane),
                k.idempotency(job.tenant, idem) if idem else record,
            )
            args += (
                *(job_id, job.payload, job.payload_hash, job.job_class, job.tenant),
                *(job.priority, job.bucket, lane, job.tokens, job.max_tokens),
                *(job.seed, "" if job.deadline_ms is None else job.deadline_ms),
                *(job.delay_ms, job.keep_ms, idem),
            )
        flat = await self.run_list("enqueue", keys, args)
        return [
            EnqueueReply(
                status=cast("EnqueueStatus", text(status)),
                job_id=text(job_id),
                retry_after_s=number(wait) / 1000 if wait else None,
                detail=text(detail),
            )
            for status, job_id, wait, detail in zip(
                flat[0::4], flat[1::4], flat[2::4], flat[3::4], strict=True
            )
        ]

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
        with translate():
            record = await cast(
                "object",
                self._redis.hgetall(self._keys.load),  # type: ignore[misc]
            )
        fields = cast("dict[bytes, bytes]", record)
        return {text(name): text(value) for name, value in fields.items()}
