"""Commands for versions while Redis falters: lost replies, lost switches; drains."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.shard_client import KEYS, Shard, group_info, new_job
from support.waiting import wait_until

from tokenmill import Client
from tokenmill.producer.adapters import fitting
from tokenmill.producer.models import operations
from tokenmill.producer.models.operations import ModelVersions
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import (
    InvalidRequest,
    RedisUnavailable,
    ResultTimeout,
    VersionConflict,
)
from tokenmill.shared.scripts import Scripts
from tokenmill.shared.version_restoring import restored
from tokenmill.shared.versions import Route, Versions, VersionSpec

MODEL = KEYS.model


@pytest.fixture
async def mill(empty_redis, newest_redis) -> AsyncIterator[Client]:
    async with Client(newest_redis.url, patience_s=30) as client:
        yield client


@pytest.fixture
async def versions(empty_redis) -> Versions:
    """v1 and v2 are ready and live; all jobs go to v1."""
    found = Versions(empty_redis, MODEL)
    for name in ("v1", "v2"):
        model = ModelConfig(name=MODEL, version=name)
        await found.add(VersionSpec(version=name, model=model, state="ready"))
        info = group_info(f"g-{name}", version=name, weights_version=f"w-{name}")
        await Scripts(empty_redis, KEYS).register_group(f"g-{name}", info, 600_000)
    await found.fix({"v1": 100})
    return found


@pytest.fixture
def losing(monkeypatch) -> asyncio.Event:
    """While it is set, the reply to the next change is lost: the change is made."""
    change, armed = Versions.change, asyncio.Event()

    async def changed(self, decide):
        found = await change(self, decide)
        if armed.is_set() and found[1]:
            armed.clear()
            raise RedisUnavailable("the reply is lost")
        return found

    monkeypatch.setattr(Versions, "change", changed)
    return armed


async def test_each_step_waits_out_a_lost_reply_and_is_taken_once(
    mill, versions, losing
) -> None:
    losing.set()
    assert await mill.switch_version(MODEL, "v2", 25) == {"v1": 75, "v2": 25}
    losing.set()
    assert await mill.switch_version(MODEL, "v2") == {"v2": 100}
    losing.set()
    assert await mill.rollback_version(MODEL) == {"v1": 75, "v2": 25}
    await mill.switch_version(MODEL, "v1")
    losing.set()
    await mill.shadow_version(MODEL, "v2", 10)
    assert (await versions.route() or Route()).shadow == {"v2": 10}
    losing.set()
    added = await mill.add_version(ModelConfig(name=MODEL, version="v3"))
    assert added.state == "added"
    with pytest.raises(VersionConflict, match="in use"):
        await mill.add_version(ModelConfig(name=MODEL, version="v3"))
    losing.set()
    assert (await mill.load_version(MODEL, "v3", wait_s=None)).state == "loading"
    losing.set()
    assert (await mill.drain_version(MODEL, "v3")).state == "stopped"
    losing.set()
    await mill.remove_version(MODEL, "v3")
    assert set(await versions.specs()) == {"v1", "v2"}
    assert not losing.is_set()


async def test_a_switch_that_redis_lost_before_anybody_saw_it_is_made_again(
    mill, versions, empty_redis, monkeypatch
) -> None:
    before, _ = await versions.read()
    monkeypatch.setattr(operations, "SEEN_S", 0.0)
    steps = ModelVersions(mill.session, MODEL, 1)
    await mill.switch_version(MODEL, "v2")
    switched, _ = await versions.read()
    await empty_redis.flushall()
    await versions.change(restored(before))  # by one who had not seen it
    await steps._keep(switched)
    assert (await versions.read())[0].shares == {"v2": 100}
    newer = await versions.move("v1", 40)
    await steps._keep(switched)
    assert (await versions.read())[0].shares == newer.shares


async def test_a_switch_is_looked_after_by_who_has_made_it(
    mill, versions, monkeypatch
) -> None:
    kept: list[Route] = []

    async def keep(_self, route: Route) -> None:
        kept.append(route)

    monkeypatch.setattr(ModelVersions, "_keep", keep)
    await mill.switch_version(MODEL, "v2")
    await mill.rollback_version(MODEL)
    await wait_until(lambda: len(kept) == 2)
    assert [route.shares for route in kept] == [{"v2": 100}, {"v1": 100}]


async def test_no_worker_is_asked_about_adapters_for_a_share_that_cannot_be(
    mill, versions, monkeypatch
) -> None:
    async def asked(*_: object) -> None:
        pytest.fail("a worker is asked")

    monkeypatch.setattr(fitting, "ask_about_all", asked)
    with pytest.raises(InvalidRequest, match="expected 0 to 100"):
        await mill.switch_version(MODEL, "v2", 150)


async def test_a_version_that_drains_says_which_jobs_keep_it(
    mill, versions, empty_redis
) -> None:
    shard = Shard(empty_redis)
    for version in ("v1", "v2", "v2"):
        await shard.scripts.enqueue([new_job(version=version, v=3)])
    told: list[str] = []
    with pytest.raises(ResultTimeout, match="still drains after 0 s"):
        await mill.drain_version(MODEL, "v2", wait_s=0, tell=told.append)
    (words,) = told
    assert words.startswith("v2 drains: 1 workers, 0 running; 0 running and 2 waiting ")
    assert words.endswith("jobs are for v2 alone, which takes no more of them")
