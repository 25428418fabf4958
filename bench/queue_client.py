"""The client processes of bench/queue.py: one submits, one reads every result back.

    queue_client.py produce URL JOBS     job ids and prompts to standard output
    queue_client.py read URL JOBS        the same from standard input
    queue_client.py pace URL JOBS RATE   one at a time: the time of each submit
    queue_client.py hear URL JOBS        a subscriber: the time of each end it hears
    queue_client.py results URL JOBS RATE  as pace, with latencies up to the result

Each prints one JSON object at its end (the producer to standard error).
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Coroutine
from typing import TypeVar

import redis

from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.keys import Keys

MODEL = "echo"
T = TypeVar("T")
BATCH = 1000
"""Prompts per `submit_many`."""


def prompt(number: int) -> Prompt:
    """A short prompt that no other job has; the echo engine answers with it."""
    text = f"job {number}: " + "mill " * (number % 13)
    return Prompt(text, model=MODEL, sampling=Sampling(max_tokens=256))


async def produce(url: str, count: int) -> None:
    """Submits in batches; prints (job id, text) pairs for the reader."""
    began, cpu_began = time.time(), time.process_time()
    async with Client(url) as mill:
        for first in range(0, count, BATCH):
            prompts = [prompt(n) for n in range(first, min(first + BATCH, count))]
            jobs = await mill.submit_many(prompts)
            pairs = [(j.id, p.text) for j, p in zip(jobs, prompts, strict=True)]
            print(json.dumps(pairs), flush=True)
    report = {
        "began": began,
        "submit_s": time.time() - began,
        "cpu_s": time.process_time() - cpu_began,
    }
    print(json.dumps(report), file=sys.stderr)


async def read(url: str, count: int) -> None:
    """Reads every result and compares it with what was sent."""
    loop, cpu_began = asyncio.get_running_loop(), time.process_time()
    checks: list[asyncio.Task[tuple[int, int]]] = []
    async with Client(url) as mill:
        seen = 0
        while seen < count:
            line = await loop.run_in_executor(None, sys.stdin.readline)
            if not line:
                raise SystemExit("the producer stopped early")
            expected = dict(json.loads(line))
            seen += len(expected)
            checks.append(asyncio.create_task(check(mill, expected)))
        results = [await task for task in checks]
    report = {
        "cpu_s": time.process_time() - cpu_began,
        "ended": time.time(),
        "read": sum(right + wrong for right, wrong in results),
        "wrong": sum(wrong for _, wrong in results),
    }
    print(json.dumps(report), flush=True)


async def check(mill: Client, expected: dict[str, str]) -> tuple[int, int]:
    """Reads every result of a batch and compares it with its prompt."""
    right = wrong = 0
    async for job in mill.as_completed([mill.job(job_id) for job_id in expected]):
        result = await job.result()
        same = result.text == expected[job.id]
        same &= bytes(result.choices[0].token_ids).decode() == expected[job.id]
        right, wrong = right + same, wrong + (not same)
    return right, wrong


async def at_rate(
    count: int, per_second: float, work: Callable[[int], Coroutine[object, object, T]]
) -> list[T]:
    """Starts a piece of work at every beat, whether or not earlier ones have ended."""
    began = time.perf_counter()
    tasks = []
    for number in range(count):
        late = began + number / per_second - time.perf_counter()
        await asyncio.sleep(max(late, 0.0))
        tasks.append(asyncio.create_task(work(number)))
    return [await task for task in tasks]


async def pace(url: str, count: int, per_second: float) -> None:
    """Submits at a fixed rate; prints when each submit began, by job id."""

    async def submit(number: int) -> tuple[str, float]:
        asked = prompt(number)
        began = time.time()
        return (await mill.submit(asked)).id, began

    async with Client(url) as mill:
        await submit(0)
        settle()
        print(json.dumps(dict(await at_rate(count, per_second, submit))), flush=True)


async def results(url: str, count: int, per_second: float) -> None:
    """Submits at a fixed rate and times each job up to its result in hand."""
    async with Client(url) as mill:
        await once(mill, 0)
        settle()
        latencies = await at_rate(count, per_second, lambda n: once(mill, n))
    print(json.dumps(latencies), flush=True)


def hear(url: str, count: int) -> None:
    """Prints when the end of each job was heard, by job id."""
    wake = Keys(MODEL, 0).wake("")
    heard: dict[str, float] = {}
    with redis.Redis.from_url(url).pubsub() as pubsub:
        pubsub.psubscribe(f"{wake}*")
        pubsub.get_message(timeout=5)
        settle()
        print("ready", flush=True)
        while len(heard) < count:
            message = pubsub.get_message(timeout=30)
            now = time.time()
            if message is None:
                raise SystemExit(f"heard {len(heard)} ends of {count}")
            if b'"end"' in message["data"]:
                heard[message["channel"].decode().removeprefix(wake)] = now
    print(json.dumps(heard), flush=True)


def settle() -> None:
    """Keeps pauses of this process's garbage collector out of the figures."""
    gc.collect()
    gc.freeze()


async def once(mill: Client, number: int) -> float:
    """Milliseconds from before the submit until the result is here."""
    asked = prompt(number)
    began = time.perf_counter()
    job = await mill.submit(asked)
    result = await job.result(timeout=30)
    elapsed_ms = (time.perf_counter() - began) * 1000
    if result.text != asked.text:
        raise SystemExit(f"job {number} came back as {result.text!r}")
    return elapsed_ms


def main() -> None:
    """Runs the part that the first argument names."""
    kind, url, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if kind == "produce":
        asyncio.run(produce(url, count))
    elif kind == "read":
        asyncio.run(read(url, count))
    elif kind == "hear":
        hear(url, count)
    else:
        paced = pace if kind == "pace" else results
        asyncio.run(paced(url, count, float(sys.argv[4])))


if __name__ == "__main__":
    main()
