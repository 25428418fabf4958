"""A janitor that is killed while it delivers: the next one delivers again."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import redis.asyncio
from support.pools import clean_environment
from support.receiver import receiving
from support.shard_client import KEYS, Shard
from support.waiting import wait_until

from tokenmill.shared.webhook_keys import OPEN, QUEUE, delivery_key
from tokenmill.shared.webhooks import verify

SECRET = "a secret of sixteen"


@contextlib.contextmanager
def janitor(url: str, directory: Path):
    """A janitor process of its own."""
    env = {
        **clean_environment(),
        "TOKENMILL_URL": url,
        "TOKENMILL_POOL_STATE_DIR": str(directory),
        "TOKENMILL_WEBHOOKS_SECRET": SECRET,
        "TOKENMILL_WEBHOOKS_ALLOW_PRIVATE": "true",
    }
    with (directory / "janitor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenmill", "janitor"],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


async def test_a_webhook_survives_a_kill_in_mid_delivery(newest_redis, tmp_path):
    client = redis.asyncio.Redis.from_url(newest_redis.url)
    await client.flushall()
    shard = await Shard(client).open("g1")
    async with receiving(None, "200 OK") as receiver:
        job_id = await shard.enqueue(webhook=receiver.url())
        await shard.scripts.cancel(job_id)
        with janitor(newest_redis.url, tmp_path) as first:
            await wait_until(lambda: receiver.requests, what="the first attempt")
            os.kill(first.pid, signal.SIGKILL)
            await asyncio.to_thread(first.wait, 60)
        # The time for which arq holds the task, gone by.
        assert await client.pexpire(f"arq:in-progress:webhook:{job_id}", 1)
        with janitor(newest_redis.url, tmp_path):
            await wait_until(
                lambda: len(receiver.requests) == 2,
                what="the second attempt",
            )

            async def settled() -> bool:
                state = await client.hget(delivery_key(job_id), "state")
                left = await client.exists(KEYS.webhooks, OPEN, QUEUE)
                return state == b"delivered" and not left

            await wait_until(settled, what="the delivery to be noted")
            log = tmp_path / "janitor.log"
            await wait_until(lambda: "webhook_delivered" in log.read_text())
    assert receiver.ids == [job_id, job_id]
    assert all(verify(SECRET, got.headers, got.body) for got in receiver.requests)
    assert SECRET not in log.read_text()
    await client.aclose()
