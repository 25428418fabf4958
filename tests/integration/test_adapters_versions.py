"""Adapters of models with several versions, and where they are in memory."""

import asyncio

import pytest
from support.adapter_pool import CONFIG, MODEL, working
from support.plain_adapters import save_plain_adapter
from support.scheduled_pool import scheduling
from support.waiting import wait_until
from typer.testing import CliRunner

from tokenmill import Client, Prompt, Sampling
from tokenmill.__main__ import build_app
from tokenmill.scheduler.groups import GroupReader
from tokenmill.shared.adapters import short_digest
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import InvalidRequest
from tokenmill.shared.keys import Keys
from tokenmill.shared.versions import Versions, VersionSpec
from tokenmill.workers.adapters_echo import echo_adapters


@pytest.fixture
async def mill(empty_redis, newest_redis):
    async with Client(newest_redis.url) as client:
        yield client


async def two_versions(client, shares: dict[str, float]) -> None:
    versions = Versions(client, MODEL)
    for name in ("v1", "v2"):
        model = ModelConfig(name=MODEL, version=name)
        spec = VersionSpec(
            version=name, model=model, state="ready", weights_version=f"w-{name}"
        )
        await versions.add(spec)
    await versions.fix(shares)


async def command(mill: Client, *words: str) -> str:
    every = [*words, "--url", mill.session.url]
    found = await asyncio.to_thread(CliRunner().invoke, build_app(), every)
    assert found.exit_code == 0, found.output
    return found.stderr


async def test_an_adapter_that_one_version_cannot_serve_is_refused_by_name(
    mill, empty_redis, tmp_path
) -> None:
    path = save_plain_adapter(tmp_path / "tone", rank=4)
    await two_versions(empty_redis, {"v1": 75, "v2": 25})
    large, small = echo_adapters(1 << 20, 16), echo_adapters(1 << 20, 2)
    async with (
        working(empty_redis, large, weights="w-v1"),
        working(empty_redis, small, version="v2", weights="w-v2"),
    ):
        with pytest.raises(InvalidRequest, match=r"get jobs, v2 cannot .*rank 4"):
            await mill.add_adapter("tone", path, model=MODEL)
        assert await mill.adapters() == []
        card = await mill.add_adapter("tone", path, model=MODEL, force=True)
        assert "rank 4" in card.checked["w-v2"]
        assert "jobs that get there fail: v2 cannot serve it" in card.notes[-1]
        listed = await command(mill, "lora", "list")
        assert "echo:tone cannot be served by v2 (" in listed


async def test_a_forced_switch_names_what_it_leaves_without_service(
    mill, empty_redis, tmp_path
) -> None:
    path = save_plain_adapter(tmp_path / "tone", rank=4)
    await two_versions(empty_redis, {"v1": 100})
    large, small = echo_adapters(1 << 20, 16), echo_adapters(1 << 20, 2)
    async with (
        working(empty_redis, large, weights="w-v1"),
        working(empty_redis, small, version="v2", weights="w-v2"),
    ):
        await mill.add_adapter("tone", path, model=MODEL)
        assert "echo:tone" not in await command(mill, "lora", "list")
        told = await command(mill, "models", "switch", MODEL, "v2", "--force")
        assert "v2 of echo cannot serve 1 of the model's adapters: tone (" in told
        infos = {one.version: one for one in await mill.model_versions(MODEL)}
        assert infos["v1"].unserved_adapters == ()
        assert infos["v2"].unserved_adapters == ("tone",)
        listed = await command(mill, "lora", "list")
        assert "echo:tone is served by no version that gets jobs: not by v2 (" in listed
        assert "echo v2 gets jobs and cannot serve 1 adapters" in await command(
            mill, "models", "list"
        )


async def test_a_job_names_its_adapter_and_a_worker_what_it_has_in_memory(
    mill, empty_redis, tmp_path
) -> None:
    path = save_plain_adapter(tmp_path / "tone")
    async with working(empty_redis, echo_adapters(1 << 20, 16)):
        card = await mill.add_adapter("tone", path, model=MODEL)
        prompt = Prompt(
            "hi", model=MODEL, adapter="tone", sampling=Sampling(max_tokens=4)
        )
        job = await mill.submit(prompt)
        info = await job.info()
        assert (info.state, info.adapter) == ("queued", "tone")
        reader = GroupReader(empty_redis, Keys(MODEL, 0))
        (group,) = await reader.current()
        assert group.adapters == frozenset()
        async with scheduling(empty_redis, CONFIG):
            await job.result(timeout=60)

        async def announced() -> bool:
            groups = await GroupReader(empty_redis, Keys(MODEL, 0)).current()
            return [one.adapters for one in groups] == [{short_digest(card.digest)}]

        await wait_until(announced, what="the adapter in the group's hash")
