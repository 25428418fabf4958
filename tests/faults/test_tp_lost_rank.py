"""A group of ranks loses one, or its leader, in mid-stream: nothing is lost with it.

`tokenmill up` runs one worker that is split over two processes. Whatever is killed or
stopped, the whole group ends within seconds, is started again, and its jobs go on at
their next token with the text of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import redis
from support.fault_pool import with_faults
from support.follower import Follower
from support.pools import MODEL, UpProcess, all_gone, up
from support.tiny_models import save_tiny_model
from support.waiting import wait_until

from tokenmill import Client, JobResult, Prompt, Sampling
from tokenmill.shared.keys import Keys

TOKENS = 50
RANK_TIMEOUT_S = 4.0
LETTERS = dict.fromkeys(range(ord("a"), ord("z") + 1), 40.0)
CASES = {
    "greedy": Sampling(),
    "choices": Sampling(temperature=1.0, n=2, logit_bias=LETTERS, logprobs=1),
}


class Group:
    """The worker that `up` runs at this moment: its leader and its followers."""

    def __init__(self, pool: UpProcess) -> None:
        self.leader = psutil.Process(pool.pids("worker-0")[-1])
        self.followers = self.leader.children()
        assert len(self.followers) == 1

    @property
    def all(self) -> list[psutil.Process]:
        return [self.leader, *self.followers]


@pytest.fixture(scope="module")
def tp_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """A pool whose only worker has two ranks; it leaves no file and no process."""
    directory = tmp_path_factory.mktemp("pool")
    temporary = directory / "tmp"
    temporary.mkdir()
    model = save_tiny_model("llama", directory)
    settings = {
        "TOKENMILL_MODELS": json.dumps([{"name": MODEL, "path": str(model), "tp": 2}]),
        "TOKENMILL_WORKER_DEVICE": "cpu",
        "TOKENMILL_WORKER_THREADS": "2",
        "TOKENMILL_WORKER_KV_MEMORY_MB": "16",
        "TOKENMILL_WORKER_RANK_TIMEOUT_S": str(RANK_TIMEOUT_S),
        "STEP_DELAY_MS": "15",
        "TMPDIR": str(temporary),
        **with_faults(),
    }
    shared = set(_shared_files())
    with up(directory, engine="model", **settings) as pool:
        yield pool
    assert list(temporary.iterdir()) == []
    assert not set(_shared_files()) - shared


def _shared_files() -> list[str]:
    place = Path("/dev/shm")
    return [f"{one}" for one in place.glob("*torch*")] if place.is_dir() else []


@pytest.fixture
async def tp_mill(tp_pool: UpProcess) -> AsyncIterator[Client]:
    async with Client(tp_pool.url) as client:
        yield client


async def submit(mill: Client) -> dict[str, Follower]:
    prompts = [
        Prompt(
            f"Once {name} upon a time",
            model=MODEL,
            sampling=msgspec.structs.replace(
                sampling, max_tokens=TOKENS, ignore_eos=True, seed=17
            ),
        )
        for name, sampling in CASES.items()
    ]
    jobs = await mill.submit_many(prompts)
    return {name: Follower(job) for name, job in zip(CASES, jobs, strict=True)}


async def results(followers: dict[str, Follower]) -> dict[str, JobResult]:
    ended = await asyncio.gather(*(one.ended(90) for one in followers.values()))
    return dict(zip(followers, ended, strict=True))


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, JobResult]:
    """Filled by the first test that asks for it."""
    return {}


@pytest.fixture
async def whole(
    tp_mill: Client, undisturbed: dict[str, JobResult]
) -> dict[str, JobResult]:
    """What the jobs give when nothing happens to them."""
    if not undisturbed:
        undisturbed.update(await results(await submit(tp_mill)))
    return undisturbed


def kill_follower(group: Group) -> None:
    group.followers[0].send_signal(signal.SIGKILL)


def kill_leader(group: Group) -> None:
    group.leader.send_signal(signal.SIGKILL)


def stop_follower(group: Group) -> None:
    group.followers[0].send_signal(signal.SIGSTOP)


@pytest.mark.parametrize(
    ("fault", "exit_code", "cause", "within_s"),
    [
        (kill_follower, 75, "was killed by SIGKILL", 2.0),
        (stop_follower, 75, "gave no sign of life for 2 s", RANK_TIMEOUT_S),
        (kill_leader, -9, "the worker was killed by SIGKILL", 2.0),
    ],
)
async def test_jobs_go_on_with_the_same_text(
    tp_pool: UpProcess, tp_mill: Client, whole, fault, exit_code, cause, within_s
) -> None:
    group = Group(tp_pool)
    followers = await submit(tp_mill)
    await followers["greedy"].has_tokens(5)
    began = time.monotonic()
    fault(group)
    gone = await asyncio.to_thread(all_gone, group.all, within_s + 5)
    assert gone, "the group outlived its lost rank"
    assert time.monotonic() - began < within_s + 2, "seconds, on a busy host"
    await wait_until(lambda: f"died (exit {exit_code})" in tp_pool.text)
    resumed = await results(followers)
    with redis.Redis.from_url(tp_pool.url) as client:
        for name, result in resumed.items():
            assert result.choices == whole[name].choices, name
            fields = client.hgetall(Keys(MODEL, 0).job(result.id))
            assert fields[b"lease_losses"] == b"1"
            assert cause in fields[b"last_error"].decode()
            assert result.weights_version.endswith("+tp2")
    assert Group(tp_pool).leader.pid != group.leader.pid


async def test_a_signal_to_every_process_drains(
    tp_pool: UpProcess, tp_mill: Client, whole
) -> None:
    """As of a service manager: the followers go on until their leader has drained."""
    group = Group(tp_pool)
    followers = await submit(tp_mill)
    await followers["greedy"].has_tokens(5)
    for process in group.all:
        os.kill(process.pid, signal.SIGTERM)
    ended = await results(followers)
    assert await asyncio.to_thread(all_gone, group.all)
    await wait_until(lambda: "ended (exit 0)" in tp_pool.text)
    with redis.Redis.from_url(tp_pool.url) as client:
        for name, result in ended.items():
            assert result.choices == whole[name].choices, name
            fields = client.hgetall(Keys(MODEL, 0).job(result.id))
            assert b"lease_losses" not in fields
            assert fields[b"epoch"] == b"2", "dispatched once, and ended"
