"""A worker that was silent beyond its leases: it changes nothing and starts anew."""

import asyncio
import signal
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

import pytest
from support.bench_modules import bench_module
from support.fault_pool import LEASE_S, MODEL, FaultPool, WorkerProcess
from support.follower import Follower
from support.waiting import PATIENCE_S, wait_until, wait_until_sync

from tokenmill import Client, JobResult, Prompt, Sampling

pytest_plugins = "support.tiny_pool"
LENGTHS = (150, 60, 64, 68, 72)
"""Output tokens. All run when the worker falls silent, at the eighth token or soon
after. One that is cut off ends the short ones meanwhile, so it tries to publish, to
finish and to renew.
"""
SILENT_AT = 8
# Content that is kept would make blocks look held; here all are to be free.
SETTINGS = {"TOKENMILL_WORKER_PREFIX_CACHE": "false"}


@pytest.fixture(scope="module")
def proxy(pool: FaultPool) -> Iterator[object]:
    made = bench_module("chaos_proxy").Proxy(urlsplit(pool.url).port)
    yield made
    made.close()


@pytest.fixture(scope="module")
def worker(pool: FaultPool, proxy: object) -> WorkerProcess:
    """The worker that falls silent; its way to Redis can be cut."""
    parts = urlsplit(pool.url)
    user, _, _ = parts.netloc.rpartition("@")
    through = urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{proxy.port}"))
    return pool.ready_worker(TOKENMILL_URL=through)


@pytest.fixture(scope="module")
def other(pool: FaultPool, worker: WorkerProcess) -> WorkerProcess:
    """The one that takes over; asleep while it is not wanted."""
    made = pool.ready_worker()
    made.signal(signal.SIGSTOP)
    return made


async def run_all(mill: Client) -> list[Follower]:
    prompts = [
        Prompt(
            "a zombie",
            model=MODEL,
            sampling=Sampling(
                max_tokens=length, temperature=0.9, seed=length, ignore_eos=True
            ),
        )
        for length in LENGTHS
    ]
    return [Follower(job) for job in await mill.submit_many(prompts)]


async def whole(mill: Client) -> list[JobResult]:
    return [await one.ended() for one in await run_all(mill)]


def furthest(jobs: list[Follower]) -> int:
    return max(one.num_tokens for one in jobs)


async def all_run(pool: FaultPool, jobs: list[Follower]) -> None:
    """Waits until the worker has them all, and one is far enough to hold them."""

    def so() -> bool:
        states = {pool.record(one.job.id)["state"] for one in jobs}
        return states == {"running"} and furthest(jobs) >= SILENT_AT

    await wait_until(so, every_s=0.002, what="all jobs at work")


def taken_from(pool: FaultPool, worker: WorkerProcess, jobs: list[Follower]) -> bool:
    return all(pool.owner(one.job.id) != worker.group for one in jobs)


def published(pool: FaultPool, jobs: list[Follower]) -> list[list[bytes]]:
    """Entries of each log that are of the first epoch: the zombie's."""
    logs = [pool.redis.xrange(pool.keys.log(one.job.id)) for one in jobs]
    return [[key for key, _ in log if key.startswith(b"1-")] for log in logs]


async def serves_anew(pool: FaultPool, mill: Client, worker: WorkerProcess) -> None:
    """Its blocks are free, its credit whole, and new jobs run there."""

    def rests() -> bool:
        group = pool.group(worker)
        return (
            group.get("num_running") == "0"
            and group["allocated_tokens"] == "0"
            and group["free_blocks"] == group["pool_blocks"]
            and group["credit_running"] == group["max_running"]
        )

    await wait_until(rests, what=f"an idle group, not {pool.group(worker)}")
    prompt = Prompt("anew", model=MODEL, sampling=Sampling(max_tokens=3))
    job = await mill.submit(prompt)
    await job.result(timeout=60)
    assert pool.owner(job.id) == worker.group


async def check_takeover(
    pool: FaultPool, jobs: list[Follower], expected: list[JobResult]
) -> None:
    for job, result in zip(jobs, expected, strict=True):
        ended = await job.ended()
        assert ended.choices == result.choices
        assert ended.usage == result.usage
        fields = pool.record(ended.id)
        assert fields["lease_losses"] == "1"
        assert fields.get("attempts", "0") == "0"


async def hand_over(
    pool: FaultPool, worker: WorkerProcess, other: WorkerProcess, jobs: list[Follower]
) -> None:
    """Waits until all jobs were taken from the silent worker; then wakes the other."""

    def taken() -> bool:
        return taken_from(pool, worker, jobs) or all(
            pool.record(one.job.id)["state"] == "queued" for one in jobs
        )

    await wait_until(taken, what="the reaper")
    other.signal(signal.SIGCONT)
    await wait_until(lambda: pool.owner(jobs[0].job.id) == other.group)


async def sleep_again(pool: FaultPool, other: WorkerProcess) -> None:
    other.signal(signal.SIGSTOP)
    await asyncio.to_thread(
        wait_until_sync, lambda: not pool.group(other), what="its silence"
    )


async def test_a_worker_that_wakes_up_late_changes_nothing(
    pool: FaultPool, mill: Client, worker: WorkerProcess, other: WorkerProcess
) -> None:
    await sleep_again(pool, other)
    expected = await whole(mill)
    with pool.held("zombie", SILENT_AT, len(LENGTHS)):
        jobs = await run_all(mill)
        await all_run(pool, jobs)
        worker.signal(signal.SIGSTOP)
    await hand_over(pool, worker, other, jobs)
    before = published(pool, jobs)
    worker.signal(signal.SIGCONT)
    await check_takeover(pool, jobs, expected)
    assert published(pool, jobs) == before
    await wait_until(lambda: worker.text.count('"job_lost"') >= len(jobs))
    await sleep_again(pool, other)
    await serves_anew(pool, mill, worker)


async def test_nor_does_one_that_was_cut_off_and_went_on_computing(
    pool: FaultPool,
    mill: Client,
    worker: WorkerProcess,
    other: WorkerProcess,
    proxy: object,
) -> None:
    await sleep_again(pool, other)
    expected = await whole(mill)
    lost = worker.text.count('"job_lost"')
    cut_s = 3 * LEASE_S
    with pool.held("zombie", SILENT_AT, len(LENGTHS)):
        jobs = await run_all(mill)
        await all_run(pool, jobs)
        proxy.freeze(cut_s)
        proxy.drop()
    await hand_over(pool, worker, other, jobs)
    before = published(pool, jobs)
    await check_takeover(pool, jobs, expected)
    # Back in touch, it tries to send what it has made meanwhile.
    await wait_until(
        lambda: worker.text.count('"job_lost"') >= lost + len(jobs),
        timeout_s=cut_s + PATIENCE_S,
        what=f"the jobs dropped\n{worker.text}",
    )
    assert published(pool, jobs) == before
    await sleep_again(pool, other)
    await serves_anew(pool, mill, worker)


async def test_a_connection_that_is_killed_costs_nothing(
    pool: FaultPool, mill: Client, worker: WorkerProcess, other: WorkerProcess
) -> None:
    await sleep_again(pool, other)
    expected = await whole(mill)
    jobs = await run_all(mill)
    for tokens in (5, 30, 80):
        with pool.held("zombie", tokens):
            await wait_until(lambda n=tokens: furthest(jobs) >= n)
            pool.redis.client_kill_filter(_type="normal", skipme=True)
            pool.redis.client_kill_filter(_type="pubsub", skipme=True)
    for job, result in zip(jobs, expected, strict=True):
        ended = await job.ended()
        assert ended.choices == result.choices
        fields = pool.record(ended.id)
        assert fields.get("lease_losses", "0") == "0"
        assert fields["epoch"] == "2", "dispatched once, and ended"
