"""Versions change under load, crash at load and are killed: nobody's job suffers."""

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator

import psutil
import pytest
from support.fault_pool import with_faults
from support.pools import MODEL, UpProcess, up
from support.waiting import Delay, ticks, wait_until

from tokenmill import Client, Job, Prompt, Sampling
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import VersionFailed

STEP_MS = 10
LENGTH = 30
EVERY_S = 0.03
PHASE_JOBS = 100
TURNS = 3
"""Others on this machine make both slower, each when they like."""
SWITCH_EVERY_S = 0.25
FLOOR_S = 0.6
"""A normal P99 below this is not held against a busy machine."""
SETTINGS = {
    "TOKENMILL_WORKER_DRAIN_S": "0.5",
    "TOKENMILL_WORKER_MAX_RUNNING": "64",
    "TOKENMILL_WORKER_LEASE_MS": "2000",
    "CRASH_AT_LOAD": "crashes",
}


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    directory = tmp_path_factory.mktemp("updated")
    env = {**SETTINGS, **with_faults()}
    with up(directory, engine=f"echo:{STEP_MS}", **env) as pool:
        yield pool


@pytest.fixture
async def operating(updated: UpProcess) -> AsyncIterator[Client]:
    async with Client(updated.url) as client:
        known = {one.version for one in await client.model_versions(MODEL)}
        if "v2" not in known:
            await client.add_version(ModelConfig(name=MODEL, version="v2"))
        await client.load_version(MODEL, "v2")
        await client.switch_version(MODEL, "v1")
        yield client


async def submit(mill: Client, length: int = LENGTH, **fields: object) -> Job:
    prompt = Prompt("m" * length, model=MODEL, sampling=Sampling(max_tokens=10_000))
    return await mill.submit(_changed(prompt, fields))


def _changed(prompt: Prompt, fields: dict[str, object]) -> Prompt:
    from msgspec.structs import replace

    return replace(prompt, **fields)


async def phase(
    mill: Client, is_enough: Callable[[], bool] = lambda: True
) -> tuple[list[float], set[str | None]]:
    """Sends jobs at a steady rate, until there are some and others have done enough.

    Returns:
        Seconds of each, and who served them.
    """

    async def one() -> tuple[float, str | None]:
        began = time.monotonic()
        result = await (await submit(mill)).result(timeout=60)
        assert result.text == "m" * LENGTH
        assert result.state == "succeeded"
        return time.monotonic() - began, result.version

    jobs: list[asyncio.Task[tuple[float, str | None]]] = []
    async for _ in ticks(EVERY_S):
        jobs.append(asyncio.create_task(one()))
        if len(jobs) >= PHASE_JOBS and is_enough():
            break
    ended = await asyncio.gather(*jobs)
    return sorted(took for took, _ in ended), {version for _, version in ended}


async def switching(mill: Client, made: list[str]) -> None:
    """Moves jobs to and fro, at once and in part, until cancelled; notes each turn."""
    turns = [("v2", 100.0), ("v1", 100.0), ("v2", 30.0), ("v2", 100.0), ("", 0.0)]
    async for _ in ticks(SWITCH_EVERY_S):
        version, percent = turns[len(made) % len(turns)]
        if version:
            await mill.switch_version(MODEL, version, percent)
        else:
            await mill.rollback_version(MODEL)
        made.append(version)


def p99(ordered: list[float]) -> float:
    return ordered[math.ceil(len(ordered) * 0.99) - 1]


async def test_switches_under_load_cost_no_job_and_little_time(operating) -> None:
    for _ in range(TURNS):
        normal, made = p99((await phase(operating))[0]), []
        moving = asyncio.create_task(switching(operating, made))
        async with Delay() as delay:
            ended, served = await phase(
                operating, lambda m=made, t=moving: len(m) >= 5 or t.done()
            )
        moving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await moving
        moved = p99(ended) - delay.allowance_s
        sys.stdout.write(f"P99 {normal:.3f} s, ")
        sys.stdout.write(f"with {len(made)} switches {moved:.3f} s\n")
        assert served == {"v1", "v2"}
        if moved <= 1.5 * max(normal, FLOOR_S):
            return
        await operating.switch_version(MODEL, "v1")
    pytest.fail("switches cost more than half of the time that jobs take")


async def test_what_a_version_runs_ends_there_however_long_it_takes(operating) -> None:
    await operating.switch_version(MODEL, "v2")
    job = await submit(operating, 250)  # far longer than a worker's own time to drain
    async for _ in job.stream():
        break
    await operating.switch_version(MODEL, "v1")
    drained = await operating.drain_version(MODEL, "v2", wait_s=150)
    assert drained.state == "stopped"
    result = await job.result(timeout=60)  # it had ended before the version did
    assert (result.version, len(result.text)) == ("v2", 250)
    assert (await job.info()).attempts == 0


async def test_a_version_that_crashes_at_load_is_given_up_and_gets_nothing(
    updated, operating
) -> None:
    name = "crashes"
    await operating.add_version(ModelConfig(name=MODEL, version=name))
    with pytest.raises(VersionFailed, match="exit code -9"):
        await operating.load_version(MODEL, name, wait_s=150)
    assert len(updated.pids(f"worker-{MODEL}-{name}-0")) == 3
    job = await submit(operating, 5)
    assert (await job.result(timeout=60)).version == "v1"


async def test_a_killed_worker_of_the_new_version_comes_back(
    updated, operating
) -> None:
    await operating.switch_version(MODEL, "v2")
    jobs = [await submit(operating, 80) for _ in range(5)]
    async for _ in jobs[-1].stream():
        break
    pid = updated.pids(f"worker-{MODEL}-v2-0")[-1]
    psutil.Process(pid).kill()
    results = [await job.result(timeout=60) for job in jobs]
    assert {len(result.text) for result in results} == {80}
    assert {result.version for result in results} == {"v2"}

    async def back() -> bool:
        infos = {one.version: one for one in await operating.model_versions(MODEL)}
        return infos["v2"].groups == 1 and infos["v2"].state == "ready"

    await wait_until(back)
