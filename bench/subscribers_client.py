"""The client processes of bench/subscribers.py.

    subscribers_client.py submit URL JOBS TOKENS       prints the jobs' ids
    subscribers_client.py follow URL                   ids of jobs on standard input
    subscribers_client.py plain URL                    names of channels likewise
    subscribers_client.py publish URL JOBS TOKENS STEP_MS

The followers print a line once all are subscribed, and at the end, for each subscriber,
what it followed and the monotonic time at which it had each token.
"""

import asyncio
import gc
import json
import sys
import time

import redis
import redis.asyncio

from tokenmill import Client, Prompt, Sampling
from tokenmill.producer.job import Job

LINE = "subscribed"
SUBSCRIBED_S = 60.0
Seen = tuple[str, list[float]]


async def submit(url: str, jobs: int, tokens: int) -> None:
    """Enqueues the jobs; they wait for a worker."""
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    prompts = [
        Prompt(f"job {number} ", model="echo", sampling=sampling)
        for number in range(jobs)
    ]
    async with Client(url) as mill:
        handles = await mill.submit_many(prompts, when_unserved="wait")
    print(json.dumps([job.id for job in handles]), flush=True)


async def follow(url: str, ids: list[str]) -> None:
    """Follows every job; one client, so one connection that listens."""
    async with Client(url) as mill:
        tasks = [asyncio.create_task(one(mill.job(job_id))) for job_id in ids]
        channels = [mill.job(job_id).shard.wake(job_id) for job_id in ids]
        await subscribed(url, channels)
        settle()
        print(LINE, flush=True)
        print(json.dumps([await task for task in tasks]), flush=True)


async def one(job: Job) -> Seen:
    """Follows one job to its end."""
    times: list[float] = []
    async for delta in job.stream():
        now = time.monotonic()
        times += [now] * len(delta.token_ids)
    return job.id, times


async def subscribed(url: str, channels: list[str]) -> None:
    """Returns once the server has a subscriber of every channel."""
    give_up = time.monotonic() + SUBSCRIBED_S
    async with redis.asyncio.Redis.from_url(url) as server:
        while time.monotonic() < give_up:
            counts = await server.pubsub_numsub(*channels)
            if all(count for _, count in counts):
                return
            await asyncio.sleep(0.1)
    raise SystemExit(f"not all subscribed in {SUBSCRIBED_S:.0f} s")


async def plain(url: str, channels: list[str]) -> None:
    """Follows every channel with redis-py's own pub/sub, a connection each."""
    async with redis.asyncio.Redis.from_url(url, max_connections=100_000) as server:
        pubsubs = [server.pubsub(ignore_subscribe_messages=True) for _ in channels]
        for pubsub, channel in zip(pubsubs, channels, strict=True):
            await pubsub.subscribe(channel)
        tasks = [
            asyncio.create_task(hear(pubsub, channel))
            for pubsub, channel in zip(pubsubs, channels, strict=True)
        ]
        await subscribed(url, channels)
        settle()
        print(LINE, flush=True)
        print(json.dumps([await task for task in tasks]), flush=True)


async def hear(pubsub: "redis.asyncio.client.PubSub", channel: str) -> Seen:
    """Hears one channel to its end."""
    times: list[float] = []
    async for message in pubsub.listen():
        now = time.monotonic()
        if message["data"] == b"end":
            break
        times.append(now)
    return channel, times


def publish(url: str, jobs: int, tokens: int, step_s: float) -> None:
    """Publishes a message of a delta's size to every channel at every step."""
    times: dict[str, list[float]] = {f"plain:{n}": [] for n in range(jobs)}
    text = json.dumps({"offset": 17, "token_ids": [106], "text": "j"})
    began = time.monotonic()
    with redis.Redis.from_url(url) as server:
        for step in range(1, tokens + 1):
            time.sleep(max(began + step * step_s - time.monotonic(), 0.0))
            send(server, list(times), text, times)
        send(server, list(times), "end", {})
    print(json.dumps(times), flush=True)


def send(
    server: "redis.Redis", channels: list[str], text: str, times: dict[str, list[float]]
) -> None:
    """Publishes in pipelines of 256, as many as a worker's call has."""
    for first in range(0, len(channels), 256):
        pipe = server.pipeline(transaction=False)
        now = time.monotonic()
        for channel in channels[first : first + 256]:
            pipe.publish(channel, text)
            if times:
                times[channel].append(now)
        pipe.execute()


def settle() -> None:
    """Keeps pauses of this process's garbage collector out of the figures."""
    gc.collect()
    gc.freeze()


def main() -> None:
    """Runs the part that the first argument names."""
    kind, url, *more = sys.argv[1:]
    if kind == "submit":
        asyncio.run(submit(url, int(more[0]), int(more[1])))
    elif kind == "publish":
        publish(url, int(more[0]), int(more[1]), int(more[2]) / 1000)
    else:
        ids = json.loads(sys.stdin.readline())
        asyncio.run(follow(url, ids) if kind == "follow" else plain(url, ids))


if __name__ == "__main__":
    main()
