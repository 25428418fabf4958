"""A group of ranks loses one, or its leader, in mid-stream: nothing is lost with it.

`tokenmill up` runs one worker that is split over two processes; another group and a
worker that is not split stand beside it. Whatever is killed or stopped, the whole group
ends within seconds, `up` starts its own again, and jobs go on at their next token with
the text of an undisturbed run, on a group of the same degree alone; those with an
adapter do, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from support.fault_pool import FaultPool, WorkerProcess, fault_pool, with_faults
from support.follower import Follower
from support.pools import MODEL, all_gone
from support.tiny_adapters import save_tiny_adapter
from support.tiny_models import save_tiny_model
from support.waiting import PATIENCE_S, Delay, wait_until

from tokenmill import Client, JobResult, Prompt, Sampling
from tokenmill.shared.pool.shard_checks import findings_of
from tokenmill.shared.scripts_scheduler import group_info

TOKENS = 50
TOKENS_AT_FAULT = 5
RANK_TIMEOUT_S = 4.0
LETTERS = dict.fromkeys(range(ord("a"), ord("z") + 1), 40.0)
ADAPTER = "polite"
CASES = {
    ADAPTER: Sampling(),
    "choices": Sampling(temperature=1.0, n=2, logit_bias=LETTERS, logprobs=1),
}


class Group:
    """A worker with its ranks: its leader, and who follows it."""

    def __init__(self, leader: int) -> None:
        self.leader = psutil.Process(leader)
        self.followers = self.leader.children()
        assert len(self.followers) == 1

    @property
    def all(self) -> list[psutil.Process]:
        return [self.leader, *self.followers]


def own_group(pool: FaultPool) -> Group:
    """The one that `up` runs at this moment."""
    return Group(pool.up.pids("worker-0")[-1])


@pytest.fixture(scope="module")
def tp_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultPool]:
    """A pool whose own worker has two ranks; it leaves no file and no process."""
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
        "HOLD_FILE": str(directory / "hold"),
        "TMPDIR": str(temporary),
        **with_faults(),
    }
    shared = set(_shared_files())
    with fault_pool(directory, MODEL, own=True, **settings) as pool:
        yield pool
    assert list(temporary.iterdir()) == []
    assert not set(_shared_files()) - shared


def _shared_files() -> list[str]:
    place = Path("/dev/shm")
    return [f"{one}" for one in place.glob("*torch*")] if place.is_dir() else []


@pytest.fixture
async def tp_mill(tp_pool: FaultPool) -> AsyncIterator[Client]:
    async with Client(tp_pool.url) as client:
        yield client


async def submit(mill: Client) -> dict[str, Follower]:
    prompts = [
        Prompt(
            f"Once {name} upon a time",
            model=MODEL,
            adapter=ADAPTER if name == ADAPTER else None,
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
    tp_pool: FaultPool, tp_mill: Client, undisturbed: dict[str, JobResult]
) -> dict[str, JobResult]:
    """What the jobs give when nothing happens to them."""
    if not undisturbed:
        adapter = save_tiny_adapter(
            tp_pool.directory / "llama", tp_pool.directory / "adapter", size=0.5
        )
        await tp_mill.add_adapter(ADAPTER, adapter, model=MODEL)
        undisturbed.update(await results(await submit(tp_mill)))
    return undisturbed


def kill_follower(group: Group) -> None:
    group.followers[0].send_signal(signal.SIGKILL)


def kill_leader(group: Group) -> None:
    group.leader.send_signal(signal.SIGKILL)


def stop_follower(group: Group) -> None:
    group.followers[0].send_signal(signal.SIGSTOP)


async def check_ends(group: Group, began: float, within_s: float) -> None:
    """A fault of one, a moment ago, takes all along within so many seconds."""
    async with Delay() as delay:
        gone = await asyncio.to_thread(all_gone, group.all, PATIENCE_S)
    assert gone, "the group outlived its lost rank"
    assert time.monotonic() - began < within_s + 2 + delay.allowance_s


@pytest.fixture(scope="module")
def neighbours(tp_pool: FaultPool) -> tuple[WorkerProcess, WorkerProcess]:
    """Beside the pool's own group: another one, and a worker that is not split."""
    made = tp_pool.start_worker("--tp", "2"), tp_pool.start_worker("--tp", "1")
    for worker in made:
        worker.wait_ready()
    return made


async def test_a_group_is_one_worker_to_the_pool(
    tp_pool: FaultPool, tp_mill: Client, whole
) -> None:
    (found,) = (await tp_mill.snapshot()).groups
    assert found.tp == 2
    (follower,) = own_group(tp_pool).followers
    settings = {"TOKENMILL_URL", "TOKENMILL_MODELS"}
    assert not settings & follower.environ().keys()
    raw = tp_pool.redis.hgetall(tp_pool.keys.group(found.group))
    assert raw[b"tp"] == b"2"
    assert raw[b"weights_version"].endswith(b"+tp2")
    load_line = findings_of(group_info(raw))[0]
    assert "split over 2 processes (tp)" in load_line.message


Jobs = list[tuple[str, Follower]]


async def begun(
    pool: FaultPool, mill: Client, is_wanted: Callable[[str], bool]
) -> tuple[Jobs, Jobs]:
    """Jobs of which some have begun with a group that is wanted: those, and all."""
    every = [job for _ in range(4) for job in (await submit(mill)).items()]

    def here() -> Jobs:
        return [
            (name, one)
            for name, one in every
            if one.num_tokens >= TOKENS_AT_FAULT and is_wanted(pool.owner(one.job.id))
        ]

    await wait_until(here, every_s=0.002, what="a job of that group")
    return here(), every


async def all_serve(mill: Client) -> None:
    """Waits until the pool's own group is back."""

    async def three() -> bool:
        return len((await mill.snapshot()).groups) == 3

    await wait_until(three, timeout_s=150, what="the group that was lost")


@pytest.mark.parametrize(
    ("whose", "fault", "exit_code", "cause", "within_s"),
    [
        ("own", stop_follower, 75, "gave no sign of life for 2 s", RANK_TIMEOUT_S),
        ("own", kill_leader, -9, "the worker was killed by SIGKILL", 2.0),
        ("other", kill_follower, 75, "was killed by SIGKILL", 2.0),
    ],
)
async def test_jobs_go_on_at_their_degree_alone(
    tp_pool, tp_mill, whole, neighbours, whose, fault, exit_code, cause, within_s
) -> None:
    """The last ones wait for a group, while a worker that is not split has room."""
    other, single = neighbours
    await all_serve(tp_mill)
    names = {"", other.group, single.group}
    with tp_pool.held("upon", TOKENS_AT_FAULT):
        if whose == "own":
            group, is_there = own_group(tp_pool), lambda one: one not in names
        else:
            group, is_there = Group(other.process.pid), lambda one: one == other.group
        moving, every = await begun(tp_pool, tp_mill, is_there)
        began = time.monotonic()
        fault(group)
    await check_ends(group, began, within_s)
    if whose == "own":
        await wait_until(lambda: f"died (exit {exit_code})" in tp_pool.up.text)
    else:
        assert await asyncio.to_thread(other.process.wait, PATIENCE_S) == exit_code
    for name, one in moving:
        result = await one.ended(90)
        assert result.choices == whole[name].choices
        assert str(result.weights_version).endswith("+tp2")
        assert result.id not in single.text
        record = tp_pool.record(result.id)
        assert record["lease_losses"] == "1"
        assert cause in record["last_error"]
    for _, one in every:
        await one.ended(90)


async def test_a_signal_to_every_process_drains(
    tp_pool: FaultPool, tp_mill: Client, whole, neighbours
) -> None:
    """As of a service manager: the followers go on until their leader has drained."""
    single = neighbours[1]
    group, losses = own_group(tp_pool), tp_pool.up.logs().count("rank_lost")
    running, every = await begun(
        tp_pool, tp_mill, lambda owner: owner not in ("", single.group)
    )
    for process in group.all:
        os.kill(process.pid, signal.SIGTERM)
    for name, one in running:
        result = await one.ended()
        assert result.choices == whole[name].choices, name
        record = tp_pool.record(result.id)
        assert "lease_losses" not in record
        assert record["epoch"] == "2", "dispatched once, and ended"
    for _, one in every:
        await one.ended()
    assert await asyncio.to_thread(all_gone, group.all)
    await wait_until(lambda: "ended (exit 0)" in tp_pool.up.text)
    assert tp_pool.up.logs().count("rank_lost") == losses
