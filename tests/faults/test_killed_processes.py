"""Real processes are killed while streams run; what clients see must not differ."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import redis
from support.pools import MODEL, UpProcess, last_fence, up
from support.servers import RedisServer, running
from support.waiting import wait_until

from tokenmill import Client, Delta, Prompt, Sampling
from tokenmill.shared.keys import Keys

TEXT = "".join(chr(0x61 + i % 26) for i in range(150)) + "äöü€"
QUICK = {
    "TOKENMILL_WORKER_LEASE_MS": "5000",
    "TOKENMILL_SCHEDULER_LEADER_LEASE_MS": "1000",
    "TOKENMILL_WORKER_DRAIN_S": "0.3",
}
STEP = "echo:15"
"""Fifteen milliseconds a token: some seconds a stream."""


class Stream:
    """One job, followed to its end by a task."""

    def __init__(self, job: object) -> None:
        self.job = job
        self.deltas: list[Delta] = []
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for delta in self.job.stream():
            self.deltas.append(delta)

    async def has_begun(self) -> None:
        await wait_until(lambda: len(self.deltas) >= 3)

    async def ended(self, timeout_s: float = 60) -> None:
        await asyncio.wait_for(self.task, timeout_s)

    def check(self, text: str) -> None:
        """No gap, no repeat, and the text of an uninterrupted run."""
        offset = 0
        for delta in self.deltas:
            assert delta.offset == offset
            offset += len(delta.token_ids)
        assert "".join(delta.text for delta in self.deltas) == text
        assert offset == len(text.encode())


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> UpProcess:
    with up(
        tmp_path_factory.mktemp("pool"), "--standby", "1", engine=STEP, **QUICK
    ) as pool:
        yield pool


@pytest.fixture
async def mill(pool: UpProcess) -> AsyncIterator[Client]:
    async with Client(pool.url) as client:
        yield client


def prompt(text: str = TEXT) -> Prompt:
    return Prompt(text, model=MODEL, sampling=Sampling(max_tokens=10_000))


def record(pool: UpProcess, job_id: str) -> dict[bytes, bytes]:
    with redis.Redis.from_url(pool.url) as client:
        return client.hgetall(Keys(MODEL, 0).job(job_id))


def active_scheduler(pool: UpProcess) -> str:
    """Name of the process that won the scheduler's lease last."""
    logs = pool.directory / "logs"
    names = ("scheduler", "standby-1")
    return max(names, key=lambda name: last_fence(logs / f"{name}.log"))


async def test_a_killed_worker_is_not_noticed_in_the_stream(pool, mill) -> None:
    streams = [Stream(await mill.submit(prompt(TEXT + str(i)))) for i in range(3)]
    for stream in streams:
        await stream.has_begun()
    psutil.Process(pool.pids("worker-0")[-1]).kill()
    for i, stream in enumerate(streams):
        await stream.ended()
        stream.check(TEXT + str(i))
        result = await stream.job.result(timeout=60)
        assert result.text == TEXT + str(i)
        fields = record(pool, stream.job.id)
        assert fields[b"lease_losses"] == b"1"
        assert fields.get(b"attempts", b"0") == b"0"


async def test_a_killed_scheduler_is_replaced_by_the_standby(pool, mill) -> None:
    stream = Stream(await mill.submit(prompt()))
    await stream.has_begun()
    psutil.Process(pool.pids(active_scheduler(pool))[-1]).kill()
    later = await mill.submit(prompt("short"))
    assert (await later.result(timeout=60)).text == "short"
    await stream.ended()
    stream.check(TEXT)


async def test_a_drained_worker_costs_its_jobs_nothing(pool, mill) -> None:
    stream = Stream(await mill.submit(prompt()))
    await stream.has_begun()
    os.kill(pool.pids("worker-0")[-1], signal.SIGTERM)
    await stream.ended()
    stream.check(TEXT)
    fields = record(pool, stream.job.id)
    assert fields.get(b"attempts", b"0") == b"0"
    assert fields.get(b"lease_losses", b"0") == b"0"
    assert int(fields[b"epoch"]) >= 2


async def test_a_stopped_worker_that_wakes_up_late_changes_nothing(pool, mill) -> None:
    """SIGSTOP is a long pause: the lease ends, another takes over, the zombie wakes."""
    stream = Stream(await mill.submit(prompt()))
    await stream.has_begun()
    zombie = pool.pids("worker-0")[-1]
    os.kill(zombie, signal.SIGSTOP)
    keys = Keys(MODEL, 0)
    with redis.Redis.from_url(pool.url) as client:

        def taken_away() -> bool:
            return client.hget(keys.job(stream.job.id), "state") == b"queued"

        await wait_until(taken_away)
    os.kill(zombie, signal.SIGCONT)
    await stream.ended()
    stream.check(TEXT)
    assert record(pool, stream.job.id)[b"state"] == b"succeeded"


async def test_cancels_reach_a_running_job(pool, mill) -> None:
    job = await mill.submit(
        Prompt(
            "abc", model=MODEL, sampling=Sampling(max_tokens=90_000, ignore_eos=True)
        )
    )
    stream = Stream(job)
    await stream.has_begun()
    await job.cancel()

    async def cancelled() -> bool:
        return record(pool, job.id)[b"state"] == b"cancelled"

    await wait_until(cancelled)
    stream.task.cancel()


@pytest.fixture
def durable(tmp_path: Path) -> RedisServer:
    with running("8.2", "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


async def test_a_restart_of_redis_loses_nothing(durable, tmp_path) -> None:
    arguments = ("--url", durable.url)
    with up(tmp_path, *arguments, engine=STEP, **QUICK) as pool:
        async with Client(durable.url) as mill:
            stream = Stream(await mill.submit(prompt()))
            await stream.has_begun()
            durable.kill()
            log = tmp_path / "logs" / "worker-0.log"
            await wait_until(lambda: "redis_unreachable" in log.read_text())
            await asyncio.to_thread(durable.start)
            await stream.ended()
            stream.check(TEXT)
            job = await mill.submit(prompt("after"))
            assert (await job.result(timeout=60)).text == "after"
        text = log.read_text()
        assert text.count('"redis_unreachable"') == 1
        assert text.count('"redis_back"') == 1
        assert len(pool.pids("worker-0")) == 2  # starting and running, never again
