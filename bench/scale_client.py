"""The producer of bench/scale.py.

    scale_client.py fill URL COUNT TENANTS     enqueues so many
    scale_client.py hold URL LEVEL TENANTS     keeps so many, until its input ends

Each prints one JSON object at its end.
"""

import asyncio
import json
import sys
import time

import redis.asyncio
from queue_client import prompt

from tokenmill import Client, JobClass, Prompt
from tokenmill.shared.keys import Keys

BATCH = 5_000
"""Prompts per `submit_many` of a fill."""
HELD = 1_000
"""The same while a level is kept."""


def job_of(number: int, tenants: int) -> Prompt:
    """A prompt; tenants and classes take turns."""
    import msgspec

    bulk = number // tenants % 2
    return msgspec.structs.replace(
        prompt(number),
        tenant=f"tenant-{number % tenants}",
        job_class=JobClass.BULK if bulk else JobClass.INTERACTIVE,
    )


async def fill(url: str, count: int, tenants: int) -> None:
    """Enqueues jobs; nobody needs to serve them."""
    rates: list[float] = []
    async with Client(url) as mill:
        for first in range(0, count, BATCH):
            numbers = range(first, min(first + BATCH, count))
            began = time.perf_counter()
            await mill.submit_many(
                [job_of(n, tenants) for n in numbers], when_unserved="wait"
            )
            rates.append(len(numbers) / (time.perf_counter() - began))
    sizes = [len((job_of(n, tenants).text or "").encode()) for n in range(200)]
    tenth = max(len(rates) // 10, 1)
    report = {
        "first_per_s": sum(rates[:tenth]) / tenth,
        "last_per_s": sum(rates[-tenth:]) / tenth,
        "payload_bytes": sum(sizes) / len(sizes),
    }
    print(json.dumps(report), flush=True)


async def hold(url: str, level: int, tenants: int) -> None:
    """Enqueues whenever fewer wait than the level and a batch."""
    over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    load, number = Keys("echo", 0).load, 0
    async with Client(url) as mill, redis.asyncio.Redis.from_url(url) as server:
        while not over.done():
            waiting = int(await server.hget(load, "jobs") or 0)
            if waiting >= level + HELD:
                await asyncio.sleep(0.01)
                continue
            numbers = range(number, number + HELD)
            await mill.submit_many(
                [job_of(n, tenants) for n in numbers], when_unserved="wait"
            )
            number += HELD
    print(json.dumps({"enqueued": number}), flush=True)


def main() -> None:
    """Runs the part that the first argument names."""
    kind, url, count, tenants = sys.argv[1:]
    part = fill if kind == "fill" else hold
    asyncio.run(part(url, int(count), int(tenants)))


if __name__ == "__main__":
    main()
