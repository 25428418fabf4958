"""Adapters of a real, tiny model: from the command of registration to the tokens."""

import asyncio
import secrets
from pathlib import Path

import pytest
from support.scheduled_pool import scheduling
from support.tiny_adapters import save_tiny_adapter
from support.tiny_models import save_tiny_model
from support.waiting import wait_until

from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.config import Config, ModelConfig, SchedulerConfig, WorkerConfig
from tokenmill.shared.errors import InvalidRequest
from tokenmill.shared.keys import Keys
from tokenmill.workers.bridge import Worker
from tokenmill.workers.loading import Loaded, load
from tokenmill.workers.registration import WorkerSpec

NAME = "tiny-base"
CONFIG = Config(
    scheduler=SchedulerConfig(leader_lease_ms=300),
    worker=WorkerConfig(
        num_blocks=64, threads=1, lease_ms=6000, drain_s=0.2, max_adapter_rank=8
    ),
)


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("adapters-model"))


@pytest.fixture(scope="module")
def tiny_loaded(tiny_base: Path) -> Loaded:
    model = ModelConfig(name=NAME, path=str(tiny_base))
    return load("model", model, CONFIG.worker)


@pytest.fixture
async def tiny_mill(empty_redis, newest_redis, tiny_loaded):
    """A client of a pool with one worker of the tiny model."""
    worker = Worker(
        client=empty_redis,
        keys=Keys(NAME, 0),
        engine=tiny_loaded.engine,
        spec=WorkerSpec(
            group=f"w-{secrets.token_hex(8)}",
            card=tiny_loaded.card,
            bundle=tiny_loaded.bundle,
            block_size=tiny_loaded.block_size,
            batch_tokens=tiny_loaded.batch_tokens,
        ),
        config=CONFIG,
        adapters=tiny_loaded.adapters,
    )
    await worker.announce()
    serving = asyncio.create_task(worker.run())
    async with scheduling(empty_redis, CONFIG), Client(newest_redis.url) as mill:
        yield mill
        worker.drain()
        await asyncio.wait_for(serving, 60)


async def test_jobs_of_several_adapters_and_of_none_run_side_by_side(
    tiny_mill: Client, tiny_base, tiny_loaded, tmp_path
) -> None:
    for index, name in enumerate(("one", "two")):
        path = save_tiny_adapter(tiny_base, tmp_path / name, seed=index, size=0.5)
        card = await tiny_mill.add_adapter(name, path, model=NAME)
        assert card.rank == 4
        assert card.base == tiny_loaded.card.weights_version
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    prompts = [
        Prompt("the same text", model=NAME, adapter=adapter, sampling=sampling)
        for adapter in (None, "one", "two", "one", None)
    ]
    together = await tiny_mill.submit_many(prompts)
    outputs = [(await job.result(timeout=60)).choices[0].token_ids for job in together]
    assert outputs[0] == outputs[4]
    assert outputs[1] == outputs[3]
    assert len({outputs[0], outputs[1], outputs[2]}) == 3
    alone = await (await tiny_mill.submit(prompts[2])).result(timeout=60)
    assert alone.choices[0].token_ids == outputs[2]
    held = tiny_loaded.adapters
    assert held is not None
    await wait_until(lambda: held.stats().leased == 0, what="the adapters let go")


async def test_what_does_not_fit_the_base_is_refused_with_what_is_wrong(
    tiny_mill: Client, tiny_base, tmp_path
) -> None:
    other = save_tiny_model("llama", tmp_path / "other", num_hidden_layers=5)
    wrong = {
        "another base": (
            save_tiny_adapter(other, tmp_path / "foreign"),
            "another base",
        ),
        "rank": (save_tiny_adapter(tiny_base, tmp_path / "high", rank=9), "rank 9"),
        "values": (
            save_tiny_adapter(tiny_base, tmp_path / "nan", size=float("nan")),
            "nan|finite",
        ),
    }
    for path, why in wrong.values():
        with pytest.raises(InvalidRequest, match=rf"(?i)'bad' is refused.*({why})"):
            await tiny_mill.add_adapter("bad", path, model=NAME)
    assert await tiny_mill.adapters() == []
