"""`tokenmill work --tp`: what it refuses, announces and leaves behind."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.fault_pool import FaultPool, fault_pool
from support.pools import all_gone
from support.tiny_models import save_tiny_model

from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.config import ModelConfig, WorkerConfig
from tokenmill.shared.errors import ConfigError
from tokenmill.shared.pool.shard_checks import findings_of
from tokenmill.shared.scripts_scheduler import group_info
from tokenmill.workers.loading import load
from tokenmill.workers.rank_place import choose_place

NAME = "split"
SETTINGS = {
    "TOKENMILL_WORKER_DEVICE": "cpu",
    "TOKENMILL_WORKER_KV_MEMORY_MB": "16",
}


@pytest.fixture(scope="module")
def split_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultPool]:
    directory = tmp_path_factory.mktemp("pool")
    model = save_tiny_model("llama", directory)
    with fault_pool(directory, NAME, "--model", str(model), **SETTINGS) as made:
        yield made


def refused(pool: FaultPool, *arguments: str) -> tuple[int, str]:
    """Starts a worker that must not come up; returns its exit code and output."""
    worker = pool.start_worker(*arguments)
    return worker.process.wait(60), worker.text


def test_a_degree_that_does_not_divide_is_refused_before_any_rank_starts(
    split_pool: FaultPool,
) -> None:
    code, text = refused(split_pool, "--tp", "4")
    assert code == 2, text
    assert "degrees that work are 1, 2, 6" in text
    assert "group_connected" not in text
    assert "Traceback" not in text


def test_more_devices_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match="each rank needs a CUDA device of its own"):
        choose_place("cuda", 64)
    assert choose_place("cpu", 64).backend == "gloo"


def test_what_ranks_cannot_do_is_said_at_once() -> None:
    model = ModelConfig(name="m", path="/no/such", tp=2)
    with pytest.raises(ConfigError, match="profile it with tp = 1"):
        load("model", model, WorkerConfig(), profile=Path("p.json"))
    assert load("echo", model, WorkerConfig()).tp == 1


async def test_a_group_announces_itself_serves_and_leaves_nothing(
    split_pool: FaultPool,
) -> None:
    worker = split_pool.start_worker("--tp", "2")
    await asyncio.to_thread(worker.wait_ready)
    followers = psutil.Process(worker.process.pid).children()
    assert len(followers) == 1
    environment = followers[0].environ()
    assert "TOKENMILL_URL" not in environment
    facts = split_pool.group(worker)
    assert facts["tp"] == "2"
    assert facts["weights_version"].endswith("+tp2")
    raw = split_pool.redis.hgetall(split_pool.keys.group(worker.group))
    load_line = findings_of(group_info(raw))[0]
    assert "split over 2 processes (tp)" in load_line.message
    async with Client(split_pool.url) as mill:
        job = await mill.submit(
            Prompt("Once", model=NAME, sampling=Sampling(max_tokens=8, ignore_eos=True))
        )
        result = await job.result(timeout=30)
        (status,) = (await mill.snapshot()).groups
    assert result.usage.completion_tokens == 8
    assert result.weights_version == facts["weights_version"]
    assert status.tp == 2
    worker.signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.process.wait, 20) == 0
    assert all_gone(followers)
    assert not split_pool.group(worker)
    assert "rank_lost" not in worker.text


def test_what_a_damaged_checkpoint_lacks_is_said_once(
    split_pool: FaultPool, tmp_path: Path
) -> None:
    model = tmp_path / "damaged"
    shutil.copytree(split_pool.directory / "llama", model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    code, text = refused(split_pool, "--model", str(model), "--tp", "2")
    assert code == 14, text
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert str(weights) in error
