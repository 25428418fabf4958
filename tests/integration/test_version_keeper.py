"""The keeper of versions on one host of several, with children that are only played."""

import asyncio

import pytest
from support.played_host import MODEL, SETTINGS, Host
from support.shard_client import KEYS, group_info
from support.waiting import wait_until

from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.keys import Keys
from tokenmill.shared.pool import version_failures
from tokenmill.shared.pool.output import Output
from tokenmill.shared.pool.processes import Child, ChildState
from tokenmill.shared.pool.version_crew import VersionCrew
from tokenmill.shared.pool.versions import TRIES
from tokenmill.shared.scripts import Scripts
from tokenmill.shared.version_keys import versions_key
from tokenmill.shared.version_restoring import restored
from tokenmill.shared.version_retiring import forgotten, retiring
from tokenmill.shared.versions import Versions, VersionSpec


@pytest.fixture(autouse=True)
def _nobody_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(version_failures, "ALONE_S", 0.0)


@pytest.fixture
def host(empty_redis, tmp_path) -> Host:
    return Host(empty_redis, tmp_path)


@pytest.fixture
def versions(empty_redis) -> Versions:
    return Versions(empty_redis, MODEL)


async def added(versions: Versions, name: str = "v2", state="loading") -> None:
    model = ModelConfig(name=MODEL, version=name)
    await versions.add(VersionSpec(version=name, model=model, state=state))


async def state(versions: Versions, name: str = "v2") -> tuple[str, str]:
    spec = (await versions.specs())[name]
    return spec.state, spec.reason


async def live(client, group: str, version: str, weights: str) -> None:
    info = group_info(group, version=version, weights_version=weights)
    await Scripts(client, KEYS).register_group(group, info, 60_000)


async def begun(client, job: str, weights: str) -> None:
    """A job that waits for another attempt on these weights."""
    await client.hset(KEYS.job(job), mapping={"weights": weights, "owner": ""})
    await client.xadd(KEYS.resume, {"id": job})


async def test_a_drained_host_starts_nothing_while_another_still_drains(
    host, versions, empty_redis
) -> None:
    await versions.fix({"v1": 100})
    await added(versions, state="ready")
    await versions.set_state("v2", "ready", weights_version="w2")
    await host.keeper.look()
    await live(empty_redis, "elsewhere", "v2", "w2")
    await begun(empty_redis, "m.0.a", "w2")  # which the other host will go on with
    await versions.drain("v2")
    await host.keeper.look()
    (child,) = host.hired
    child.state = ChildState.STOPPED
    for _ in range(3):
        await host.keeper.look()
    assert len(host.hired) == 1
    assert await state(versions) == ("draining", "")
    await Scripts(empty_redis, KEYS).forfeit("elsewhere", "it ended", counts=False)
    await empty_redis.delete(KEYS.resume)
    await host.keeper.look()
    assert (await state(versions))[0] == "stopped"


async def test_what_a_crashed_worker_had_begun_ends_before_its_version_does(
    host, versions, empty_redis
) -> None:
    await versions.fix({"v1": 100})
    await added(versions)
    await host.keeper.look()
    assert (await state(versions))[1].endswith("starts its workers (1)")
    await versions.set_state("v2", "ready", weights_version="w2")
    await versions.drain("v2")
    await begun(empty_redis, "m.0.a", "w2")
    for tries in range(1, TRIES + 1):
        host.hired[-1].state = ChildState.STOPPED  # killed, and not again by itself
        await host.keeper.look()
        assert len(host.hired) == 1 + tries
    host.hired[-1].state = ChildState.STOPPED
    await host.keeper.look()
    assert (await state(versions))[0] == "failed"
    assert len(host.hired) == 1 + TRIES


async def test_weights_that_another_version_has_hold_up_no_drain(
    host, versions, empty_redis
) -> None:
    await added(versions)
    await versions.set_state("v2", "ready", weights_version="same")
    await live(empty_redis, "other", "v1", "same")
    await begun(empty_redis, "m.0.a", "same")
    await versions.drain("v2")
    await host.keeper.look()
    assert host.hired == []
    assert (await state(versions))[0] == "stopped"


async def test_a_version_that_fails_here_alone_is_left_to_other_hosts(
    host, versions, empty_redis, capsys
) -> None:
    await added(versions)
    await host.keeper.look()
    (child,) = host.hired
    await versions.set_state("v2", "ready")
    await live(empty_redis, "elsewhere", "v2", "w2")
    child.state, child.exit_code = ChildState.FAILED, 14
    for _ in range(3):
        await host.keeper.look()
    assert (await state(versions))[0] == "ready"
    assert len(host.hired) == 1
    assert capsys.readouterr().out.count("fails here: its workers end") == 1
    host.plan_fails = True
    await added(versions, "v3")
    await host.keeper.look()
    assert await state(versions, "v3") == (
        "failed",
        "configuration key 'models': it cannot be placed here",
    )


async def test_the_version_of_the_settings_serves_until_somebody_says_otherwise(
    host, versions
) -> None:
    """Also where none of its workers is there when another is added."""
    await host.keeper.look()
    assert (await versions.read())[0].serial == 0
    await added(versions)
    await host.keeper.look()
    assert (await versions.read())[0].shares == {"v1": 100}


async def test_who_serves_already_goes_on_serving(host, versions, empty_redis) -> None:
    await live(empty_redis, "by-hand", "v5", "w5")
    await added(versions)
    await host.keeper.look()
    assert (await versions.read())[0].shares == {"v5": 100}


async def test_workers_that_end_slowly_keep_nobody_waiting(host, versions) -> None:
    await added(versions)
    await host.keeper.look()
    host.dismissal.clear()
    await versions.set_state("v2", "failed")
    await host.keeper.look()
    await added(versions, "v3")
    await host.keeper.look()
    assert [child.spec.name for child in host.hired] == ["w-v2", "w-v3"]
    await versions.set_state("v2", "loading")
    await host.keeper.look()
    assert len(host.hired) == 2  # its name is in use until they are gone
    host.dismissal.set()
    await wait_until(lambda: len(host.gone) == 1)
    await host.keeper.look()
    assert [child.spec.name for child in host.hired[2:]] == ["w-v2"]


async def test_one_model_that_cannot_be_read_stops_no_other(
    host, versions, empty_redis
) -> None:
    await added(versions)
    await Versions(empty_redis, "a").fix({"v1": 100})
    await empty_redis.hset(versions_key("a"), "spec:v1", "no JSON")
    await host.keeper.look()
    assert [child.spec.name for child in host.hired] == ["w-v2"]


async def test_what_the_settings_run_is_not_stopped_by_describing_it(
    host, versions
) -> None:
    child = Child(host.planned(SETTINGS)[0], host.output, lambda _: None)
    host.keeper.adopt((MODEL, "v1"), [child])
    await added(versions, "v1", "added")
    await host.keeper.look()
    assert host.gone == []
    assert (await state(versions, "v1"))[0] == "loading"


async def test_workers_of_a_model_that_retired_end_and_those_of_a_lost_one_stay(
    host, versions, empty_redis
) -> None:
    host.keeper._configured.clear()
    await added(versions)
    await host.keeper.look()
    await empty_redis.flushall()
    await host.keeper.look()
    assert host.gone == []
    assert (await state(versions))[0] == "loading"
    await versions.change(retiring)
    await host.keeper.look()
    await versions.set_state("v2", "stopped")
    assert (await versions.change(forgotten(MODEL)))[1]
    await host.keeper.look()
    await wait_until(lambda: host.gone == host.hired)
    assert len(host.gone) == 1


async def test_a_lost_version_that_nobody_has_described_again_goes_on(
    host, versions, empty_redis
) -> None:
    await versions.fix({"v1": 100})
    await added(versions, state="ready")
    await host.keeper.look()
    seen, _ = await versions.read()
    await empty_redis.flushall()
    await versions.change(restored(seen))
    await added(versions, "v1", "ready")
    await host.keeper.look()
    assert host.gone == []
    assert await state(versions) == ("ready", "")


async def test_settings_that_name_a_model_take_it_back(host, versions) -> None:
    await added(versions, "v1", "ready")
    await versions.change(retiring)
    await host.keeper.stopped()
    assert not (await versions.read())[0].retiring


def test_no_two_versions_have_workers_of_one_name(tmp_path) -> None:
    from tokenmill.shared.config import Config
    from tokenmill.shared.pool.plan import PoolOptions

    output = Output(tmp_path, lambda *_: None, logs_too=False)
    crew = VersionCrew(
        None,  # type: ignore[arg-type]
        PoolOptions(engine="echo"),
        Config(),
        "redis://",
        output,
        lambda _: None,
        console=False,
    )
    pairs = [("a", "b-c"), ("a-b", "c"), ("a", "b+c"), ("a", "b_c"), ("a/b", "c")]
    models = [ModelConfig(name=name, version=version) for name, version in pairs]
    names = [crew._planned(model)[0].name for model in models]
    assert len(set(names)) == len(names)
    assert crew._planned(ModelConfig(name="a", version="v2"))[0].name == "worker-a-v2-0"


async def test_a_version_that_drains_is_needed_for_what_it_has_begun(
    versions, empty_redis
) -> None:
    from tokenmill.shared.version_life import VersionLife

    life = VersionLife(empty_redis, MODEL, 1)
    await added(versions)
    assert not await life.is_needed("v2", "w2", 0)
    await begun(empty_redis, "m.0.a", "w2")
    assert await life.is_needed("v2", "w2", 0)
    assert not await life.is_needed("v2", "w1", 0)
    keys = Keys(MODEL, 0)
    await empty_redis.hset(keys.job("m.0.a"), "owner", "mine")
    assert not await life.is_needed("v2", "w2", 0, "mine")


async def test_two_pools_on_one_redis_run_a_version_each_once_and_do_not_fight(
    versions, empty_redis, tmp_path
) -> None:
    """Two hosts, or two state directories: each runs the replicas, and no more."""
    one, two = (Host(empty_redis, tmp_path / name, name) for name in ("one", "two"))

    async def look(times: int = 3) -> None:
        for _ in range(times):
            await asyncio.gather(one.keeper.look(), two.keeper.look())

    await versions.fix({"v1": 100})
    await added(versions)
    await look()
    assert [len(host.hired) for host in (one, two)] == [1, 1]
    # On one it does not load: that one gives up alone, and ends nothing of the other.
    await versions.set_state("v2", "ready", weights_version="w2")
    await live(empty_redis, "on-two", "v2", "w2")
    one.hired[0].state, one.hired[0].exit_code = ChildState.FAILED, 14
    await look()
    assert await state(versions) == ("ready", "")
    assert (len(one.hired), len(two.hired), two.gone) == (1, 1, [])
    # The first to find it idle does not end it for the other, which still serves.
    await versions.drain("v2")
    await look()
    assert (await state(versions))[0] == "draining"
    assert two.gone == []
    two.hired[0].state = ChildState.STOPPED
    await Scripts(empty_redis, KEYS).forfeit("on-two", "it ended", counts=False)
    await look()
    assert (await state(versions))[0] == "stopped"
    assert [len(host.hired) for host in (one, two)] == [1, 1]
    # Loaded again, both run it again, whoever looks first.
    await wait_until(lambda: one.gone == one.hired and two.gone == two.hired)
    await versions.set_state("v2", "loading")
    await look()
    assert [len(host.hired) for host in (one, two)] == [2, 2]
