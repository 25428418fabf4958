"""What bench/enqueue.py compares: tokenmill, arq, and a plain stream as yardstick."""

import asyncio
from typing import Any, Protocol

import msgspec
import redis.asyncio
from arq import create_pool
from arq.connections import RedisSettings

from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.keys import MODELS, POOL, Keys
from tokenmill.shared.messages import DEFAULT_MODEL, ModelCard, PoolCard, encode
from tokenmill.shared.scripts import Limits, Scripts

MOST = 100_000_000
"""Waiting jobs, tokens and bytes are not to be limited here."""
BATCH = 200
"""Entries per pipeline, as jobs per call of `submit_many`."""
FILL = 5_000
"""Prompts per `submit_many` while a queue is filled."""
CARD = ModelCard(
    model=DEFAULT_MODEL,
    max_context=8192,
    vocab_size=50_000,
    tokenizer="bytes",
    has_chat_template=True,
    weights_version="bench",
)


def prompt(number: int) -> Prompt:
    """A short prompt that no other job has."""
    text = f"job {number}: " + "mill " * (number % 13)
    return Prompt(text, sampling=Sampling(max_tokens=64))


class Side(Protocol):
    """One way into a queue."""

    async def open(self) -> None:
        """Connects."""

    async def reset(self) -> None:
        """Empties the server."""

    async def redis_cpu_s(self) -> float:
        """Processor seconds that the server has used."""

    async def close(self) -> None:
        """Disconnects."""


async def cpu_s(connection: redis.asyncio.Redis) -> float:
    """Processor seconds that a server has used."""
    info = await connection.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


class Mill:
    """tokenmill's client, with a model that nobody serves: jobs stay where they are.

    Args:
        url: Redis.
    """

    def __init__(self, url: str) -> None:
        self._redis = redis.asyncio.Redis.from_url(url)
        self._client = Client(url)
        self._load = Keys(DEFAULT_MODEL, 0).load
        self._number = 0

    async def open(self) -> None:
        """Connects."""
        await self._client.open()

    async def reset(self) -> None:
        """Empties the server; its pool has one model and no limits."""
        await self._redis.flushall()
        await self._redis.set(POOL, encode(PoolCard(models=(DEFAULT_MODEL,))))
        await self._redis.hset(MODELS, DEFAULT_MODEL, encode(CARD))
        limits = Limits(
            max_waiting_jobs=MOST,
            max_waiting_tokens=1000 * MOST,
            max_waiting_bytes=1000 * MOST,
            tenant_waiting_jobs=MOST,
            tenant_waiting_tokens=1000 * MOST,
        )
        await Scripts(self._redis, Keys(DEFAULT_MODEL, 0)).write_limits(limits)
        await self.many(BATCH)  # scripts are loaded, cards are read

    def _prompts(self, count: int) -> list[Prompt]:
        self._number += count
        return [prompt(n) for n in range(self._number - count, self._number)]

    async def many(self, count: int) -> None:
        """One `submit_many`."""
        await self._client.submit_many(self._prompts(count), when_unserved="wait")

    async def singles(self, count: int, tasks: int) -> None:
        """`submit` by so many tasks, each job after the other."""
        shares = [self._prompts(count // tasks) for _ in range(tasks)]

        async def one_after_the_other(share: list[Prompt]) -> None:
            for each in share:
                await self._client.submit(each, when_unserved="wait")

        await asyncio.gather(*map(one_after_the_other, shares))

    async def fill(self, count: int) -> int:
        """Makes so many jobs wait; the bytes of their payloads."""
        before = int(await self._redis.hget(self._load, "bytes") or 0)
        for start in range(0, count, FILL):
            await self.many(min(FILL, count - start))
        return int(await self._redis.hget(self._load, "bytes") or 0) - before

    async def hold(self, depth: int) -> None:
        """Makes about so many jobs wait, however many earlier rounds have left."""
        waiting = int(await self._redis.hget(self._load, "jobs") or 0)
        if not depth <= waiting <= depth + max(depth // 10, BATCH):
            await self.reset()
            await self.fill(depth)

    async def used_memory(self) -> int:
        """Bytes that Redis uses."""
        return int((await self._redis.info("memory"))["used_memory"])

    async def redis_cpu_s(self) -> float:
        """Processor seconds that the server has used."""
        return await cpu_s(self._redis)

    async def close(self) -> None:
        """Disconnects."""
        await self._client.close()
        await self._redis.aclose()


class Arq:
    """arq's `enqueue_job`, one job a call as its interface has it.

    Args:
        url: Redis.
    """

    def __init__(self, url: str) -> None:
        self._settings = RedisSettings.from_dsn(url)
        self._pool: Any = None

    async def open(self) -> None:
        """Connects."""
        self._pool = await create_pool(
            self._settings,
            job_serializer=msgspec.msgpack.encode,
            job_deserializer=msgspec.msgpack.decode,
        )

    async def reset(self) -> None:
        """Empties the server."""
        await self._pool.flushall()

    async def singles(self, count: int, tasks: int) -> None:
        """`enqueue_job` by so many tasks, each job after the other."""

        async def one_after_the_other(first: int) -> None:
            for number in range(first, first + count // tasks):
                await self._pool.enqueue_job("run", prompt(number).text)

        share = count // tasks
        await asyncio.gather(*(one_after_the_other(n * share) for n in range(tasks)))

    async def redis_cpu_s(self) -> float:
        """Processor seconds that the server has used."""
        return await cpu_s(self._pool)

    async def close(self) -> None:
        """Disconnects."""
        await self._pool.aclose()


class Stream:
    """A pipelined XADD of the payload alone: no record, no limits, nothing checked.

    Args:
        url: Redis.
    """

    def __init__(self, url: str) -> None:
        self._redis = redis.asyncio.Redis.from_url(url)

    async def open(self) -> None:
        """Connects."""
        await self._redis.ping()

    async def reset(self) -> None:
        """Empties the server."""
        await self._redis.flushall()

    async def many(self, count: int) -> None:
        """Adds so many entries, in pipelines."""
        for start in range(0, count, BATCH):
            pipe = self._redis.pipeline(transaction=False)
            for number in range(start, min(start + BATCH, count)):
                pipe.xadd("bench", {"payload": prompt(number).text or ""})
            await pipe.execute()

    async def redis_cpu_s(self) -> float:
        """Processor seconds that the server has used."""
        return await cpu_s(self._redis)

    async def close(self) -> None:
        """Disconnects."""
        await self._redis.aclose()
