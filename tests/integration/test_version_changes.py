"""Changes of versions that meet: two operators, a lost reply, a worker that comes."""

import asyncio

import pytest
from support.shard_client import KEYS, Shard, group_info, new_job

from tokenmill import Client
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import VersionConflict
from tokenmill.shared.messages import JobResult
from tokenmill.shared.metrics.catalog import REQUESTS
from tokenmill.shared.metrics.jobs import count_end
from tokenmill.shared.shadow_keys import SHADOW_TENANT
from tokenmill.shared.version_changes import fixed
from tokenmill.shared.version_life import VersionLife
from tokenmill.shared.version_restoring import is_lost, restored
from tokenmill.shared.version_retiring import emptied, forgotten, retiring
from tokenmill.shared.versions import Route, Versions, VersionSpec
from tokenmill.workers.own_version import OwnVersion

MODEL = KEYS.model


@pytest.fixture
async def versions(empty_redis) -> Versions:
    """v1 and v2 are ready; all jobs go to v1, and before to v2."""
    found = Versions(empty_redis, MODEL)
    for name in ("v1", "v2"):
        model = ModelConfig(name=MODEL, version=name)
        await found.add(VersionSpec(version=name, model=model, state="ready"))
    await found.switch({"v2": 100})
    await found.switch({"v1": 100})
    return found


async def test_what_is_known_is_not_written_again(versions) -> None:
    """Or many workers, ready at the same moment, would keep each other waiting."""
    said = {"weights_version": "w2", "only_from": ("loading", "ready")}
    assert await versions.set_state("v2", "ready", **said)
    before, _ = await versions.read()
    assert not await versions.set_state("v2", "ready", **said)
    assert (await versions.read())[0] == before
    assert await versions.set_state("v2", "ready", reason="why", **said)


async def test_who_follows_reads_all_only_after_a_change(
    versions: Versions,
) -> None:
    first = await versions.follow()
    assert await versions.follow() is first
    await versions.set_state("v2", "failed", reason="it broke")
    assert (await versions.follow())[1]["v2"].reason == "it broke"
    assert (await Versions(versions._redis, "other").follow())[1] == {}
    await versions._redis.flushall()
    assert (await versions.follow())[1].keys() == first[1].keys()


async def test_two_who_go_back_at_once_go_back_once(versions: Versions) -> None:
    seen, _ = await versions.read()
    routes = await asyncio.gather(*(versions.rollback(seen) for _ in range(2)))
    assert [route.shares for route in routes] == [{"v2": 100}] * 2
    assert (await versions.rollback()).shares == {"v1": 100}


async def test_a_rollback_whose_reply_was_lost_is_not_undone(
    versions: Versions, monkeypatch
) -> None:
    write = versions._write

    async def twice(serial, change):
        await write(serial, change)
        return await write(serial, change)  # as the client does after a lost reply

    monkeypatch.setattr(versions, "_write", twice)
    assert (await versions.rollback()).shares == {"v2": 100}
    assert (await versions.read())[0].shares == {"v2": 100}


async def test_a_rollback_of_other_shares_than_were_seen_is_refused(
    versions: Versions,
) -> None:
    seen, _ = await versions.read()
    await versions.switch({"v1": 60, "v2": 40})
    with pytest.raises(VersionConflict, match="v1 60 %, v2 40 %; look again"):
        await versions.rollback(seen)


async def test_a_share_is_moved_whatever_else_is_written_meanwhile(
    versions: Versions,
) -> None:
    states = [versions.set_state("v2", "ready") for _ in range(5)]
    _, *_ = await asyncio.gather(versions.move("v2", 25), *states)
    assert (await versions.read())[0].shares == {"v1": 75, "v2": 25}
    await versions.switch({"v1": 100})
    with pytest.raises(VersionConflict, match="switch to the one that is to have it"):
        await versions.move("v1", 30)


async def test_what_gets_a_share_meanwhile_does_not_drain(versions: Versions) -> None:
    original = versions._read

    async def late():
        found = await original()
        versions._read = original  # type: ignore[method-assign]
        await versions.switch({"v2": 100})
        return found

    versions._read = late  # type: ignore[method-assign]
    with pytest.raises(VersionConflict, match="v2 of tiny gets 100 %"):
        await versions.drain("v2")
    assert (await versions.specs())["v2"].state == "ready"


async def test_other_settings_do_not_take_a_state_back(versions: Versions) -> None:
    await versions.set_state("v2", "draining", weights_version="w2")
    larger = ModelConfig(name=MODEL, version="v2", replicas=3)
    assert await versions.renew("v2", larger)
    assert not await versions.renew("v2", larger)
    spec = (await versions.specs())["v2"]
    assert (spec.state, spec.model.replicas, spec.weights_version) == (
        *("draining", 3),
        "w2",
    )


async def group(client, name: str, version: str) -> None:
    info = group_info(name, version=version, weights_version=f"w-{version}")
    await Shard(client).scripts.register_group(name, info, 60_000)


async def test_the_name_of_live_workers_is_in_use(empty_redis) -> None:
    """Describing it would stop them: nobody has loaded what is described."""
    life = VersionLife(empty_redis, MODEL, 1)
    await group(empty_redis, "g1", "v1")
    with pytest.raises(VersionConflict, match="in use: 1 live workers"):
        await life.require_free("v1")
    await life.versions.fix({"v1": 100})
    spec = VersionSpec(version="v1", model=ModelConfig(name=MODEL))
    with pytest.raises(VersionConflict, match="get 100 % of the jobs"):
        await life.versions.add(spec)


def worker(client, version: str, group: str) -> OwnVersion:
    model = ModelConfig(name=MODEL, version=version)
    return OwnVersion(client, KEYS, model, 1, group, supervised=True)


async def test_of_two_that_load_at_once_the_first_serves_alone(empty_redis) -> None:
    versions = Versions(empty_redis, MODEL)
    model = ModelConfig(name=MODEL, version="v2")
    await versions.add(VersionSpec(version="v2", model=model, state="loading"))
    first, second = worker(empty_redis, "v1", "a"), worker(empty_redis, "v2", "b")
    await asyncio.gather(first.begin(), second.begin())  # nobody serves yet
    await first.ready()
    await group(empty_redis, "a", "v1")
    await second.ready()
    assert (await versions.read())[0].shares == {"v1": 100}
    await asyncio.gather(first.ready(), second.ready())
    assert (await versions.read())[0].shares == {"v1": 100}


async def test_a_model_without_versions_gets_no_route(empty_redis) -> None:
    only = worker(empty_redis, "v1", "a")
    await only.begin()
    await only.ready()
    assert await empty_redis.keys("tm:version*") == []


class Idle:
    is_idle = True

    def drain(self) -> None:
        raise AssertionError


async def test_a_route_that_redis_has_lost_is_written_again(
    versions: Versions, empty_redis
) -> None:
    mine = worker(empty_redis, "v1", "a")
    await mine.begin()
    await mine.ready()
    assert not await mine._is_over(Idle())
    await empty_redis.flushall()
    assert not await mine._is_over(Idle())
    assert (await versions.read())[0].shares == {"v1": 100}
    assert not await mine._is_over(Idle())  # and what it serves itself
    assert (await versions.specs())["v1"].state == "ready"


@pytest.mark.parametrize("newest_first", [True, False])
async def test_of_lost_routes_the_newest_that_anybody_has_seen_wins(
    versions: Versions, empty_redis, newest_first: bool
) -> None:
    """Whoever writes first, and whatever is written down meanwhile."""
    old, new = (Versions(empty_redis, MODEL) for _ in range(2))
    await versions.switch({"v1": 50, "v2": 50})
    await old.follow()
    await versions.switch({"v1": 70, "v2": 30})
    await new.follow()
    await empty_redis.flushall()
    starting = Versions(empty_redis, MODEL)
    await starting.fix({"v2": 100})  # a guess, from who lives
    for one in (new, old) if newest_first else (old, new):
        await one.follow()
        for _ in range(5):  # serials beyond those of before
            await starting.set_state("v2", "ready")
    await old.follow()
    route, specs = await versions.read()
    assert route.shares == {"v1": 70, "v2": 30}
    assert [specs[name].state for name in ("v1", "v2")] == ["ready", "ready"]
    await versions.rollback()
    assert (await new.follow())[0].shares == {"v1": 50, "v2": 50}


def test_an_earlier_route_that_was_written_down_goes_before_a_later_one() -> None:
    first, later = (
        decided.route
        for now_ms, shares in ((1000, {"v1": 100}), (2000, {"v1": 50, "v2": 50}))
        if (decided := fixed(shares)(Route(), {}, now_ms))
    )
    assert is_lost(first, later)
    assert (found := restored(first)(later, {}, 3000)) is not None
    assert found.route.shares == {"v1": 100}
    assert restored(later)(first, {}, 3000) is None


async def test_a_model_that_was_forgotten_is_not_lost(versions: Versions) -> None:
    await versions.change(retiring)
    await versions.follow()
    await versions.change(emptied(MODEL))
    for name in ("v1", "v2"):
        await versions.set_state(name, "stopped")
    await versions.change(forgotten(MODEL))
    assert await versions.follow() == (Route(), {})


async def test_a_version_that_drains_when_all_is_lost_goes_on_draining(
    versions: Versions, empty_redis
) -> None:
    mine = worker(empty_redis, "v2", "a")
    await versions.drain("v2")
    assert await mine._is_over(Idle())
    await empty_redis.flushall()
    for _ in range(2):
        await mine._is_over(Idle())
    assert (await versions.specs())["v2"].state == "draining"


async def test_who_serves_says_so_where_what_was_lost_had_it_loading(
    versions: Versions, empty_redis
) -> None:
    await versions.set_state("v2", "loading")
    keeper, mine = Versions(empty_redis, MODEL), worker(empty_redis, "v2", "a")
    await keeper.follow()
    await empty_redis.flushall()
    await mine.ready()  # of which nobody knows now
    await keeper.follow()
    assert (await versions.specs())["v2"].state == "loading"
    await mine._is_over(Idle())
    assert (await versions.specs())["v2"].state == "ready"


async def test_a_version_that_jobs_wait_for_is_not_forgotten(
    versions: Versions, empty_redis, newest_redis
) -> None:
    shard = Shard(empty_redis)
    await shard.scripts.enqueue([new_job(version="v2", v=3, tenant=SHADOW_TENANT)])
    job_id = await shard.enqueue(version="v2", v=3)
    async with Client(newest_redis.url) as mill:
        with pytest.raises(VersionConflict, match=f"job {job_id}.*waits for version"):
            await mill.remove_version(MODEL, "v2")
        await mill.job(job_id).cancel()
        await mill.remove_version(MODEL, "v2")
    assert set(await versions.specs()) == {"v1"}


async def test_copies_take_no_room_from_users_and_leave_no_dead_letter(
    shard: Shard,
) -> None:
    """Neither jobs, nor tokens, nor the measured rate know of them."""
    copy = {"tenant": SHADOW_TENANT, "job_class": "bulk"}
    await shard.enqueue(**copy)
    load = await shard.scripts.load()
    assert {name: load[name] for name in load if name.startswith("tenant:")} == {
        f"tenant:{SHADOW_TENANT}:jobs": "1",
        f"tenant:{SHADOW_TENANT}:tokens": load[f"tenant:{SHADOW_TENANT}:tokens"],
    }
    assert not {"jobs", "tokens", "bytes", "tenants", "class:bulk:jobs"} & set(load)
    await shard.enqueue()
    assert (await shard.scripts.load())["jobs"] == "1"


def test_an_ended_copy_is_in_no_metric() -> None:
    before = dict(REQUESTS.values)
    ended = JobResult(id="c", state="failed", model="metric-of-copies")
    count_end(ended, "bulk", SHADOW_TENANT, 3)
    assert REQUESTS.values == before
    count_end(ended, "bulk", "somebody", 3)
    assert REQUESTS.values != before


async def test_a_failed_copy_is_no_dead_letter(shard: Shard) -> None:
    job_id = await shard.enqueue(tenant=SHADOW_TENANT)
    epoch = await shard.run_again(job_id)
    assert await shard.fail(job_id, epoch, max_attempts=1) == "failed"
    assert await shard.client.xlen(KEYS.dead) == 0
    assert "rate_jobs" not in await shard.scripts.load()
