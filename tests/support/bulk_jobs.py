"""The rest of a pool as bulk runs see it: jobs that wait, ended by a test's word."""

import msgspec
import redis.asyncio
from support.waiting import wait_until

from tokenmill.shared.bulk.job_ids import Place, place_of
from tokenmill.shared.bulk.store import RunStore
from tokenmill.shared.keys import MODELS, POOL, Keys
from tokenmill.shared.messages import (
    Choice,
    FinishReason,
    JobError,
    JobRequest,
    JobResult,
    ModelCard,
    PoolCard,
    Usage,
    encode,
)
from tokenmill.shared.scripts import Limits, Scripts

MODEL = "tiny"
KEYS = Keys(MODEL, 0)
RETENTION_MS = 60_000


class Jobs:
    """The queue of one shard whose jobs nobody runs but the test.

    Args:
        client: Redis.
        context: Tokens, which are bytes, that the model is said to hold.
    """

    def __init__(self, client: "redis.asyncio.Redis", context: int = 100_000) -> None:
        self.client = client
        self.scripts = Scripts(client, KEYS)
        self.card = ModelCard(
            model=MODEL,
            max_context=context,
            vocab_size=257,
            tokenizer="bytes",
            has_chat_template=True,
            weights_version="w",
        )

    async def publish(self) -> None:
        """Says that there is a pool with a model."""
        await self.client.hset(MODELS, MODEL, encode(self.card).decode())
        pool = PoolCard(retention_ms=RETENTION_MS, models=(MODEL,))
        await self.client.set(POOL, encode(pool))

    async def limit(self, jobs: int) -> None:
        """Lets only so many jobs wait."""
        await self.scripts.write_limits(Limits(max_waiting_jobs=jobs))

    async def waiting(self) -> list[str]:
        """Ids of jobs that have not ended, in order of place."""
        prefix = KEYS.job("")
        found = [
            name.decode().removeprefix(prefix)
            async for name in self.client.scan_iter(f"{prefix}*", count=1000)
            if await self.client.hget(name, "state") == b"queued"
        ]
        return sorted(found)

    async def wait_for(self, count: int) -> list[str]:
        """Waits until exactly so many jobs wait."""

        async def there() -> list[str] | None:
            ids = await self.waiting()
            return ids if len(ids) == count else None

        return await wait_until(there, what=f"{count} waiting jobs")  # type: ignore[return-value]

    async def request(self, job_id: str) -> JobRequest:
        """What a job asks for."""
        raw = await self.client.get(KEYS.input(job_id))
        return msgspec.json.decode(raw, type=JobRequest)

    async def end(
        self,
        job_id: str,
        text: str = "Done.",
        *,
        error: JobError | None = None,
        state: str | None = None,
        reason: FinishReason = FinishReason.STOP,
        with_event: bool = True,
    ) -> None:
        """Ends a job as a worker would, as far as runs can tell."""
        ended = state or ("succeeded" if error is None else "failed")
        choice = Choice(index=0, text=text, token_ids=(1,), finish_reason=reason)
        result = JobResult(
            id=job_id,
            state=ended,
            model=MODEL,
            choices=(choice,) if error is None else (),
            usage=Usage(prompt_tokens=10, completion_tokens=4),
            error=error,
        )
        # The script takes it out of the queue; how it ended is then written over.
        await self.scripts.cancel(job_id)
        (last,) = await self.client.xrevrange(KEYS.done, count=1)
        await self.client.xdel(KEYS.done, last[0])
        await self.client.hset(KEYS.job(job_id), "state", ended)
        await self.client.set(KEYS.output(job_id), encode(result), px=RETENTION_MS)
        if with_event:
            event = {"id": job_id, "state": ended, "class": "bulk", "tenant": "t"}
            await self.client.xadd(KEYS.done, event)

    async def lose(self, job_id: str) -> None:
        """Makes Redis forget a job, as a crash without an append-only file does."""
        await self.scripts.cancel(job_id)
        for name in (KEYS.job, KEYS.input, KEYS.output):
            await self.client.delete(name(job_id))


def place(job_id: str) -> Place:
    """Which job of which item this is."""
    found = place_of(job_id)
    assert found is not None
    return found


async def settled(store: RunStore, count: int) -> list:
    """Waits for so many outcomes that are not acknowledged; by seq."""

    async def there() -> list | None:
        rows = await store.outcomes(count=10_000)
        return [one for _, one in rows] if len(rows) >= count else None

    found = await wait_until(there, what=f"{count} outcomes")
    assert len(found) == count  # type: ignore[arg-type]
    return sorted(found, key=lambda one: (one.seq, one.generation))  # type: ignore[call-overload]
