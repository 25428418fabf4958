"""The end of a whole model: no new jobs, none left, no workers, and then no trace."""

import asyncio

import msgspec
import pytest
from support.fake_group import card as model_card
from support.shard_client import KEYS, Shard, group_info
from support.waiting import wait_until

from tokenmill import Client, Prompt
from tokenmill.producer.models import retiring as steps
from tokenmill.producer.models.cli_tables import print_versions
from tokenmill.producer.models.draining import Draining
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import (
    InvalidRequest,
    ModelUnavailable,
    ResultTimeout,
    VersionConflict,
)
from tokenmill.shared.keys import MODELS, POOL
from tokenmill.shared.messages import PoolCard
from tokenmill.shared.pool.version_checks import examine_versions
from tokenmill.shared.shadow_keys import SHADOW_TENANT
from tokenmill.shared.version_keys import VERSIONED, cards_key, versions_key
from tokenmill.shared.version_retiring import forgotten, retiring, taken_back
from tokenmill.shared.versions import Versions, VersionSpec

MODEL = KEYS.model
pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    monkeypatch.setattr(steps, "SETTLE_S", 0.02)
    monkeypatch.setattr(steps, "LOOK_EVERY_S", 0.01)


@pytest.fixture
async def versions(empty_redis) -> Versions:
    """v1 has all jobs of a model of other settings; nobody serves it any more."""
    found = Versions(empty_redis, MODEL)
    model = ModelConfig(name=MODEL)
    await found.add(VersionSpec(version="v1", model=model, state="ready"))
    await found.switch({"v1": 100})
    card = msgspec.json.encode(model_card(MODEL))
    await empty_redis.hset(MODELS, MODEL, card)
    await empty_redis.hset(cards_key(MODEL), "v1", card)
    await set_pool(empty_redis, "other")
    return found


async def set_pool(client, *models: str) -> None:
    await client.set(POOL, msgspec.json.encode(PoolCard(partitions=1, models=models)))


@pytest.fixture
async def mill(versions, newest_redis):
    async with Client(newest_redis.url) as client:
        yield client


async def nothing_is_left(client) -> bool:
    found = await client.exists(versions_key(MODEL), cards_key(MODEL))
    known = await client.hexists(MODELS, MODEL)
    return not (found or known or await client.sismember(VERSIONED, MODEL))


async def test_a_model_that_nobody_serves_is_forgotten(
    mill: Client, empty_redis, capsys
) -> None:
    print_versions(await mill.model_versions(MODEL))
    advice = capsys.readouterr().err
    assert f"models retire {MODEL}` ends the model" in advice
    assert "rollback" not in advice  # there is nothing to go back to
    shown = await examine_versions(empty_redis, KEYS, (), ())
    assert [one.severity for one in shown] == ["info", "error"]
    assert "models retire" in shown[1].cure
    await Shard(empty_redis).enqueue(tenant=SHADOW_TENANT)  # a copy ends by itself
    await mill.retire_model(MODEL)
    assert await nothing_is_left(empty_redis)
    assert await examine_versions(empty_redis, KEYS, (), ()) == []
    with pytest.raises(InvalidRequest, match="has no versions here"):
        await mill.retire_model(MODEL)
    added = await mill.add_version(ModelConfig(name=MODEL))
    assert (added.state, added.share) == ("added", None)


async def test_a_model_of_the_settings_stays(
    mill: Client, versions, empty_redis
) -> None:
    await set_pool(empty_redis, MODEL)
    with pytest.raises(VersionConflict, match="take it out of them"):
        await mill.retire_model(MODEL)
    assert not (await versions.read())[0].retiring


async def test_jobs_that_nobody_would_end_are_named_and_nothing_is_changed(
    mill: Client, versions, empty_redis
) -> None:
    job_id = await Shard(empty_redis).enqueue()
    with pytest.raises(VersionConflict, match=f"tokenmill cancel {job_id}"):
        await mill.retire_model(MODEL)
    assert not (await versions.read())[0].retiring
    await mill.job(job_id).cancel()
    await mill.retire_model(MODEL)
    assert await nothing_is_left(empty_redis)


async def group(client) -> Shard:
    shard = Shard(client)
    info = group_info("g1", version="v1", weights_version="w1")
    await shard.scripts.register_group("g1", info, 60_000)
    return shard


async def test_it_takes_no_new_jobs_and_ends_those_that_it_has(
    mill: Client, versions, empty_redis
) -> None:
    shard = await group(empty_redis)
    job_id = await shard.enqueue()
    ending = asyncio.create_task(mill.retire_model(MODEL))

    async def retires() -> bool:
        return (await versions.read())[0].retiring

    await wait_until(retires)
    for when in ("refuse", "wait"):
        with pytest.raises(ModelUnavailable, match="retires and takes no new jobs"):
            await mill.submit(Prompt("n", model=MODEL), when_unserved=when)
    with pytest.raises(ModelUnavailable, match="retires") as refusal:
        await mill.submit_many([Prompt("n", model=MODEL)])
    assert not refusal.value.is_known  # over HTTP 404, with no advice to try again
    with pytest.raises(VersionConflict, match="the model retires; add it again"):
        await mill.add_version(ModelConfig(name=MODEL, version="v2"))
    assert (await versions.read())[0].shares == {"v1": 100}  # so its job is served
    await mill.job(job_id).cancel()

    async def drains() -> bool:
        route, specs = await versions.read()
        return not route.shares and specs["v1"].state == "draining"

    await wait_until(drains)
    assert not ending.done()  # its worker lives
    await shard.scripts.forfeit("g1", "it ended", counts=False)
    await ending
    assert await nothing_is_left(empty_redis)


async def test_what_ended_half_way_is_gone_on_with(
    mill: Client, versions, empty_redis
) -> None:
    shard = await group(empty_redis)
    with pytest.raises(ResultTimeout, match=f"models retire {MODEL} goes on"):
        await mill.retire_model(MODEL, wait_s=0.1)
    (info,) = await mill.model_versions(MODEL)
    assert (info.retiring, info.state) == (True, "draining")
    assert "retires" in (await examine_versions(empty_redis, KEYS, (), ()))[-1].message
    await shard.scripts.forfeit("g1", "it ended", counts=False)
    await asyncio.gather(*(mill.retire_model(MODEL) for _ in range(2)))
    assert await nothing_is_left(empty_redis)


async def test_another_command_that_was_faster_is_no_error(
    mill: Client, versions, empty_redis, monkeypatch
) -> None:
    stop = Draining.stop_without_workers

    async def too_late(self, version: str, weights: str | None) -> None:
        await stop(self, version, weights)
        await versions.change(forgotten(MODEL))
        await stop(self, version, weights)

    monkeypatch.setattr(Draining, "stop_without_workers", too_late)
    await mill.retire_model(MODEL)
    assert await nothing_is_left(empty_redis)


async def test_loading_takes_it_back(mill: Client, versions, empty_redis) -> None:
    await group(empty_redis)
    said: list[str] = []
    ending = asyncio.create_task(mill.retire_model(MODEL, tell=said.append))
    await wait_until(lambda: said)
    assert (await mill.load_version(MODEL, "v1")).state == "ready"
    with pytest.raises(VersionConflict, match="taken back meanwhile"):
        await ending
    assert not (await versions.read())[0].retiring


async def test_nothing_that_may_run_is_forgotten(versions, empty_redis) -> None:
    assert await versions.change(taken_back) == (await versions.route(), False)
    await versions.change(retiring)
    route, done = await versions.change(forgotten(MODEL))
    assert not done
    forced = forgotten(MODEL)(route, {}, 1)
    assert forced is not None
    status, detail = await versions._write(route.serial, forced)
    assert (status, "may run" in detail) == ("refused", True)
    assert not await nothing_is_left(empty_redis)


async def test_a_version_without_replicas_says_who_starts_it(
    mill: Client, versions
) -> None:
    await mill.add_version(ModelConfig(name=MODEL, version="v4", replicas=0))
    said: list[str] = []
    await mill.load_version(MODEL, "v4", wait_s=None, tell=said.append)
    (line,) = said
    assert line.startswith("v4 has replicas = 0, so `tokenmill up` starts none")
    assert line.endswith(f"tokenmill work --name {MODEL} --version v4")
