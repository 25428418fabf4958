"""Short ways to make and move jobs in tests of the scripts."""

import json
from typing import Any

from tokenmill.shared.keys import JobId, Keys, lane_of, new_unique
from tokenmill.shared.messages import Delta, End, JobResult, Usage, encode
from tokenmill.shared.scripts import (
    DispatchItem,
    DispatchReply,
    EmitItem,
    FinishItem,
    GroupInfo,
    NewJob,
    Scripts,
    Started,
    StartItem,
)

KEYS = Keys("tiny", 0)
HOUR_MS = 3_600_000


def new_job(**changes: Any) -> NewJob:
    """A small interactive job, with `changes`."""
    fields: dict[str, Any] = {
        "id": JobId(KEYS.model, KEYS.partition, new_unique()),
        "payload": b'{"text":"hello"}',
        "payload_hash": "a" * 32,
        "job_class": "interactive",
        "tenant": "default",
        "bucket": "128",
        "tokens": 10,
        "max_tokens": 16,
        "seed": 2**63 - 1,
        "keep_ms": HOUR_MS,
    }
    return NewJob(**(fields | changes))


def group_info(group: str, **changes: Any) -> GroupInfo:
    """Facts of a group with room for plenty."""
    fields: dict[str, Any] = {
        "group": group,
        "total_blocks": 1000,
        "max_running": 100,
        "batch_tokens": 4096,
        "block_size": 8,
        "max_context": 2048,
        "weights_version": "w-1",
    }
    return GroupInfo(**(fields | changes))


def delta(offset: int, count: int = 1, choice: int = 0) -> bytes:
    """A delta of `count` tokens."""
    tokens = tuple(range(offset, offset + count))
    text = "x" * count
    return encode(Delta(choice=choice, offset=offset, token_ids=tokens, text=text))


def ending_of(
    job_id: str, state: str, usage: Usage | None = None
) -> tuple[bytes, bytes]:
    """Result and end marker; without usage, as whoever knows of none writes them."""
    told = {} if usage is None else {"usage": usage}
    result = encode(JobResult(id=job_id, state=state, model=KEYS.model, **told))
    return result, encode(Delta(end=End(state=state, **told)))


class Shard:
    """One shard with a scheduler and groups, as the scripts' tests see it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.scripts = Scripts(client, KEYS)
        self.fence = 0

    async def open(self, *groups: str, **changes: Any) -> "Shard":
        self.fence = await self.scripts.acquire_scheduler("scheduler", HOUR_MS) or 0
        for group in groups:
            await self.scripts.register_group(
                group, group_info(group, **changes), HOUR_MS
            )
        return self

    async def enqueue(self, **changes: Any) -> str:
        job = new_job(**changes)
        (reply,) = await self.scripts.enqueue([job])
        assert reply.status == "queued", reply
        return reply.job_id

    async def dispatch(
        self, job_id: str, group: str = "g1", **changes: Any
    ) -> DispatchReply:
        lane = KEYS.queue("interactive", "128", lane_of("default"))
        fields = {"tokens": 12, "cost_blocks": 4, "entry_key": lane} | changes
        item = DispatchItem(
            job_id=job_id, token_ids=b"\1\0\0\0" * 12, bucket="128", **fields
        )
        (reply,) = await self.scripts.dispatch(
            fence=self.fence,
            group=group,
            batch=new_unique(),
            lease_ms=HOUR_MS,
            items=[item],
        )
        return reply

    async def start(self, job_id: str, epoch: int, group: str = "g1") -> Started:
        entries = await self.client.xrange(KEYS.work(group))
        entry = [
            i.decode() for i, fields in entries if fields[b"id"].decode() == job_id
        ]
        (started,) = await self.scripts.start(
            group=group,
            lease_ms=HOUR_MS,
            items=[StartItem(job_id, epoch, entry[0] if entry else "")],
        )
        return started

    async def run(
        self, group: str = "g1", alone: bool = False, **changes: Any
    ) -> tuple[str, int]:
        """Enqueues, dispatches and starts one job; returns its id and epoch."""
        job_id = await self.enqueue(**changes)
        return job_id, await self.run_again(job_id, group, alone=alone)

    async def run_again(self, job_id: str, group: str = "g1", **changes: Any) -> int:
        """Dispatches and starts a queued job; returns its epoch."""
        record = await self.scripts.job(job_id) or {}
        reply = await self.dispatch(
            job_id, group, entry_key=record.get("entry_key"), **changes
        )
        assert reply.status == "dispatched", reply
        assert (await self.start(job_id, reply.epoch, group)).status == "started"
        return reply.epoch

    async def emit(
        self, job_id: str, epoch: int, seq: int, offset: int, group: str = "g1"
    ) -> str:
        (status,) = await self.scripts.emit(
            group=group, items=[EmitItem(job_id, epoch, seq, delta(offset))]
        )
        return status

    async def finish(
        self,
        job_id: str,
        epoch: int,
        seq: int = 1000,
        state: Any = "succeeded",
        group: str = "g1",
        usage: Usage | None = None,
    ) -> str:
        result, end = ending_of(job_id, state, usage)
        item = FinishItem(
            job_id=job_id, epoch=epoch, seq=seq, state=state, result=result, end=end
        )
        (status,) = await self.scripts.finish(group=group, items=[item])
        return status

    async def fail(
        self,
        job_id: str,
        epoch: int,
        max_attempts: int = 3,
        group: str = "g1",
        usage: Usage | None = None,
    ) -> str:
        result, end = ending_of(job_id, "failed", usage)
        return await self.scripts.fail(
            group=group,
            job_id=job_id,
            epoch=epoch,
            error='{"code":"engine_error","message":"boom"}',
            delay_ms=HOUR_MS,
            max_attempts=max_attempts,
            result=result,
            end=end,
        )

    async def overdue(self, zset: str, job_id: str) -> None:
        """Lets a lease, deadline or delay lie in the past."""
        await self.client.zadd(zset, {job_id: 1}, xx=True)
        if zset == KEYS.deadline and await self.client.zscore(zset, job_id):
            await self.client.hset(KEYS.job(job_id), "deadline", "1")

    async def reap(self, max_losses_alone: int = 1) -> Any:
        return await self.scripts.reap(
            fence=self.fence, limit=100, max_losses_alone=max_losses_alone
        )

    async def state(self, job_id: str) -> str:
        record = await self.scripts.job(job_id)
        return record["state"] if record else "none"

    async def result(self, job_id: str) -> Any:
        return json.loads(await self.client.get(KEYS.output(job_id)))

    async def log(self, job_id: str) -> list[Any]:
        """Entries of the token log as (id, delta or None for a fence)."""
        return [
            (i.decode(), json.loads(f[b"d"]) if b"d" in f else None)
            for i, f in await self.client.xrange(KEYS.log(job_id))
        ]
