"""A job goes on at the degree that it began with, whoever else has room for it."""

from __future__ import annotations

import asyncio
import signal

import psutil
from support.fault_pool import MODEL, FaultPool, WorkerProcess
from support.follower import Follower
from support.waiting import wait_until, wait_until_sync

from tokenmill import Client, Prompt, Sampling

pytest_plugins = "support.tiny_pool"
SETTINGS = {"TOKENMILL_WORKER_DEVICE": "cpu"}
PROMPT = Prompt(
    "Once upon a time",
    model=MODEL,
    sampling=Sampling(max_tokens=40, ignore_eos=True, temperature=1.0, seed=5),
)


def sleep(pool: FaultPool, worker: WorkerProcess) -> None:
    """Stops a worker until the pool has forgotten it; its ranks wait for it."""
    worker.signal(signal.SIGSTOP)
    wait_until_sync(lambda: not pool.group(worker), what="its silence")


async def test_a_job_resumes_at_its_degree(pool: FaultPool, mill: Client) -> None:
    split, other, whole = (
        pool.start_worker("--tp", degree) for degree in ("2", "2", "1")
    )
    for worker in (split, other, whole):
        await asyncio.to_thread(worker.wait_ready)
    for worker in (other, whole):
        await asyncio.to_thread(sleep, pool, worker)
    undisturbed = await Follower(await mill.submit(PROMPT)).ended()
    job = Follower(await mill.submit(PROMPT))
    await job.has_tokens(5)
    for worker in (other, whole):
        worker.signal(signal.SIGCONT)
    await wait_until(lambda: pool.group(other) and pool.group(whole))

    (follower,) = psutil.Process(split.process.pid).children()
    follower.kill()
    assert await asyncio.to_thread(split.process.wait, 10) == 75
    resumed = await job.ended()
    assert resumed.choices == undisturbed.choices
    assert resumed.weights_version == undisturbed.weights_version
    assert str(resumed.weights_version).endswith("+tp2")
    assert resumed.id in other.text, "its log has the line of the job's end"
    assert resumed.id not in whole.text
    assert pool.record(resumed.id)["lease_losses"] == "1"
