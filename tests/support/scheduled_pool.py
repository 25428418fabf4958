"""A queue with a scheduler in this process, and a group that the test plays itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec
import redis.asyncio
from support.waiting import wait_until

from tokenmill.scheduler.loop import PoolScheduler
from tokenmill.shared.config import Config, SchedulerConfig
from tokenmill.shared.keys import MODELS, JobId, Keys, bucket_of, new_unique
from tokenmill.shared.messages import (
    SCHEMA_VERSION,
    JobRequest,
    JobResult,
    ModelCard,
    Sampling,
    encode,
)
from tokenmill.shared.scripts import (
    FinishItem,
    GroupInfo,
    NewJob,
    Scripts,
    Started,
    StartItem,
)

KEYS = Keys("tiny", 0)
CONTEXT = 200
CONFIG = Config(scheduler=SchedulerConfig(leader_lease_ms=300))
CARD = ModelCard(
    model="tiny",
    max_context=CONTEXT,
    vocab_size=257,
    tokenizer="bytes",
    has_chat_template=True,
    weights_version="w1",
)


def new_job(
    text: str | None = "hello", *, payload: bytes | None = None, **fields: object
) -> NewJob:
    max_tokens = int(fields.pop("max_tokens", 5))  # type: ignore[call-overload]
    request = JobRequest(text=text, sampling=Sampling(max_tokens=max_tokens))
    size = len(text or "x")
    defaults: dict[str, object] = {
        "job_class": "interactive",
        "tenant": "t",
        "bucket": bucket_of(size, (128, 512)),
    }
    return NewJob(
        id=JobId("tiny", 0, new_unique()),
        payload=encode(request) if payload is None else payload,
        payload_hash="h",
        tokens=size,
        max_tokens=max_tokens,
        seed=1,
        keep_ms=60_000,
        **{**defaults, **fields},
    )


class Pool:
    """A queue with a scheduler, and one group driven by hand."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.scripts = Scripts(client, KEYS)
        self.cursor = b"0"

    async def enqueue(self, *jobs: NewJob) -> list[str]:
        replies = await self.scripts.enqueue(jobs)
        assert [r.status for r in replies] == ["queued"] * len(jobs)
        return [str(job.id) for job in jobs]

    async def card(self) -> None:
        await self.client.hset(MODELS, "tiny", encode(CARD))

    async def group(self, name: str = "w-1", **sizes: int | str) -> None:
        if not await self.client.hexists(MODELS, "tiny"):
            await self.card()
        facts = {
            "total_blocks": 100,
            "max_running": 8,
            "batch_tokens": 1000,
            "block_size": 8,
            "max_context": CONTEXT,
            "schema": SCHEMA_VERSION,
            "weights_version": "w1",
            **sizes,
        }
        info = GroupInfo(group=name, **facts)
        await self.scripts.register_group(name, info, ttl_ms=60_000)

    async def work(self, count: int, group: str = "w-1") -> list[Started]:
        """Waits for dispatched jobs and starts them."""
        found: list[tuple[bytes, dict[bytes, bytes]]] = []

        async def read() -> bool:
            reply = await self.client.xread({KEYS.work(group): self.cursor})
            rows = reply[0][1] if reply else []
            found.extend(rows)
            self.cursor = rows[-1][0] if rows else self.cursor
            return len(found) >= count

        await wait_until(read, what=f"{count} dispatched jobs")
        items = [
            StartItem(f[b"id"].decode(), int(f[b"epoch"]), entry.decode())
            for entry, f in found
        ]
        return await self.scripts.start(group=group, lease_ms=10_000, items=items)

    async def finish(self, started: Sequence[Started], group: str = "w-1") -> None:
        items = [
            FinishItem(
                job_id=s.job_id,
                epoch=s.epoch,
                seq=1,
                state="succeeded",
                result=encode(JobResult(id=s.job_id, state="succeeded", model="tiny")),
                end=b"{}",
            )
            for s in started
        ]
        assert set(await self.scripts.finish(group=group, items=items)) == {"recorded"}

    async def state(self, job_id: str) -> str:
        return (await self.scripts.job(job_id) or {}).get("state", "")

    async def result(self, job_id: str, state: str = "failed") -> JobResult:
        async def ended() -> bool:
            return await self.state(job_id) == state

        await wait_until(ended, what=f"{job_id} {state}")
        raw = await self.client.get(KEYS.output(job_id))
        return msgspec.json.decode(raw, type=JobResult)

    async def dead(self, count: int) -> list[str]:
        async def there() -> bool:
            return await self.client.xlen(KEYS.dead) >= count

        await wait_until(there, what=f"{count} dead letters")
        return [f[b"reason"].decode() for _, f in await self.client.xrange(KEYS.dead)]


@contextlib.asynccontextmanager
async def scheduling(
    client: "redis.asyncio.Redis", config: Config = CONFIG, **options: bool
) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(PoolScheduler(client, config, **options).run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
