"""SIGTERM: running jobs end, the rest goes on elsewhere, and nothing is held against
them. A second signal ends at once.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from support.fault_pool import FaultPool, WorkerProcess, fault_pool
from support.follower import Follower
from support.pools import MODEL, up
from support.servers import running
from support.waiting import wait_until

from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.keys import Keys

LEASE_MS = 3000
STEP = "echo:15"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultPool]:
    directory = tmp_path_factory.mktemp("pool")
    settings = {"TOKENMILL_WORKER_LEASE_MS": str(LEASE_MS)}
    with fault_pool(directory, MODEL, "--engine", STEP, **settings) as made:
        yield made


@pytest.fixture
async def mill(pool: FaultPool) -> AsyncIterator[Client]:
    async with Client(pool.url) as client:
        yield client


@pytest.fixture(autouse=True)
def workers_end(pool: FaultPool) -> Iterator[None]:
    yield
    pool.end_workers()


async def start(mill: Client, tokens: int, count: int = 1) -> list[Follower]:
    """Jobs of so many tokens, each with its first ones out."""
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    prompts = [Prompt(f"job {i}", model=MODEL, sampling=sampling) for i in range(count)]
    jobs = [Follower(job) for job in await mill.submit_many(prompts)]
    for job in jobs:
        await job.has_tokens(3)
    return jobs


async def ends_with(worker: WorkerProcess, timeout_s: float = 60) -> int:
    return await asyncio.to_thread(worker.process.wait, timeout_s)


def check_free(record: dict[str, str]) -> None:
    """Nothing is held against a job."""
    assert record.get("attempts", "0") == "0"
    assert record.get("lease_losses", "0") == "0"
    assert record.get("start_losses", "0") == "0"


async def test_running_jobs_end_within_the_grace_and_leases_go_on(
    pool: FaultPool, mill: Client
) -> None:
    worker = pool.ready_worker(TOKENMILL_WORKER_DRAIN_S="120")
    jobs = await start(mill, tokens=400, count=3)  # six seconds: two leases long
    worker.signal(signal.SIGTERM)
    await wait_until(lambda: pool.group(worker).get("state") == "draining")
    beat = int(pool.group(worker)["heartbeat_ms"])
    late = await mill.submit(Prompt("late", model=MODEL))
    await wait_until(lambda: int(pool.group(worker)["heartbeat_ms"]) > beat + LEASE_MS)
    for job in jobs:
        result = await job.ended()
        assert result.usage.completion_tokens == 400
        record = pool.record(result.id)
        check_free(record)
        assert record["epoch"] == "2", "dispatched once, and ended"
        assert record["owner"] in ("", worker.group)
    assert await ends_with(worker) == 0
    assert not pool.group(worker), "it has left"
    assert '"drained"' in worker.text
    assert pool.record(late.id)["state"] == "queued", "nothing new was taken"
    other = pool.ready_worker()
    assert (await late.result(timeout=60)).text == "late"
    assert pool.owner(late.id) in ("", other.group)


async def two_workers(
    pool: FaultPool, mill: Client, **env: str
) -> tuple[WorkerProcess, list[Follower], WorkerProcess]:
    """A worker with its jobs, and another with room for them."""
    first = pool.start_worker(**env)
    second = pool.ready_worker()
    await asyncio.to_thread(first.wait_ready)
    jobs = await start(mill, tokens=250, count=6)
    mine = [job for job in jobs if pool.owner(job.job.id) == first.group]
    assert mine, "the scheduler uses both"
    return first, mine, second


async def test_what_does_not_end_in_time_goes_on_elsewhere(
    pool: FaultPool, mill: Client
) -> None:
    settings = {"TOKENMILL_WORKER_DRAIN_S": "0.3"}
    first, jobs, second = await two_workers(pool, mill, **settings)
    first.signal(signal.SIGTERM)
    assert await ends_with(first) == 0
    assert first.text.count('"job_released"') == len(jobs)
    for job in jobs:
        result = await job.ended()
        assert result.usage.completion_tokens == 250
        record = pool.record(result.id)
        check_free(record)
        assert int(record["epoch"]) >= 4, "dispatched twice, taken back, ended"
    assert second.process.poll() is None


async def test_a_second_signal_ends_at_once_and_the_leases_too(
    pool: FaultPool, mill: Client
) -> None:
    # With leases this long only their end, not their running out, lets jobs go on.
    settings = {
        "TOKENMILL_WORKER_DRAIN_S": "60",
        "TOKENMILL_WORKER_LEASE_MS": "60000",
    }
    first, jobs, second = await two_workers(pool, mill, **settings)
    first.signal(signal.SIGTERM)
    await wait_until(lambda: '"draining"' in first.text)
    assert first.process.poll() is None
    first.signal(signal.SIGTERM)
    assert await ends_with(first) == 128 + signal.SIGTERM
    for job in jobs:
        result = await job.ended()
        assert result.usage.completion_tokens == 250
        record = pool.record(result.id)
        check_free(record)
        assert int(record["epoch"]) >= 4
    assert second.process.poll() is None


async def test_a_pool_that_is_told_to_end_hands_everything_back(
    tmp_path: Path,
) -> None:
    """`tokenmill up` drains all its workers; the next pool goes on with their jobs."""
    keys = Keys(MODEL, 0)
    settings = {"TOKENMILL_WORKER_DRAIN_S": "0.3"}
    with running("8.2") as server:
        arguments = ("--url", server.url, "--workers", "2")
        client = redis.Redis.from_url(server.url, decode_responses=True)
        async with Client(server.url) as mill:
            with up(tmp_path, *arguments, engine=STEP, **settings) as pool:
                jobs = await start(mill, tokens=300, count=4)
                assert await asyncio.to_thread(pool.stop) == 0
            states = {client.hget(keys.job(one.job.id), "state") for one in jobs}
            assert states == {"queued"}
            assert not client.zrange(keys.lease, 0, -1)
            with up(tmp_path, *arguments, engine=STEP, **settings):
                for job in jobs:
                    result = await job.ended()
                    assert result.usage.completion_tokens == 300
                    check_free(client.hgetall(keys.job(result.id)))
        client.close()


async def test_a_pool_that_is_told_twice_ends_at_once(tmp_path: Path) -> None:
    keys = Keys(MODEL, 0)
    settings = {
        "TOKENMILL_WORKER_DRAIN_S": "60",
        "TOKENMILL_WORKER_LEASE_MS": "60000",
    }
    with running("8.2") as server:
        client = redis.Redis.from_url(server.url, decode_responses=True)
        async with Client(server.url) as mill:
            arguments = ("--url", server.url)
            with up(tmp_path, *arguments, engine=STEP, **settings) as pool:
                jobs = await start(mill, tokens=300, count=2)
                os.kill(pool.process.pid, signal.SIGTERM)
                await wait_until(lambda: "draining; a second" in pool.text)
                assert await asyncio.to_thread(pool.stop, signal.SIGTERM) == 0
            with up(tmp_path, *arguments, engine=STEP, **settings):
                for job in jobs:
                    result = await job.ended()
                    check_free(client.hgetall(keys.job(result.id)))
        client.close()
