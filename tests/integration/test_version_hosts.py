"""A version that one host cannot load goes on where others can, or still try."""

import pytest
from support.played_host import MODEL, Host
from support.shard_client import KEYS, group_info
from support.waiting import wait_until

from tokenmill.producer.models.cli_tables import print_versions
from tokenmill.producer.models.info import version_infos
from tokenmill.producer.models.operations import _progress
from tokenmill.shared import version_hosts
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.keys import Keys
from tokenmill.shared.pool import version_failures
from tokenmill.shared.pool.version_checks import examine_versions
from tokenmill.shared.scripts import Scripts
from tokenmill.shared.version_keys import hosts_key
from tokenmill.shared.version_life import VersionLife
from tokenmill.shared.versions import Versions, VersionSpec
from tokenmill.workers.own_version import OwnVersion

WHY = "its workers end with exit code 14: it does not load"


@pytest.fixture(autouse=True)
def _nobody_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(version_failures, "ALONE_S", 0.0)
    monkeypatch.setattr(version_failures, "BEAT_EVERY_S", 0.0)
    # However slow the machine is.
    monkeypatch.setattr(version_hosts, "GONE_MS", 600_000)


@pytest.fixture
async def versions(empty_redis) -> Versions:
    found = Versions(empty_redis, MODEL)
    await found.fix({"v1": 100})
    model = ModelConfig(name=MODEL, version="v2")
    await found.add(VersionSpec(version="v2", model=model))
    await VersionLife(empty_redis, MODEL, 1).begin_load("v2")
    return found


@pytest.fixture
async def hosts(empty_redis, tmp_path, versions) -> tuple[Host, Host]:
    """Two hosts that load the version."""
    made = [Host(empty_redis, tmp_path / name, name) for name in ("one", "two")]
    for host in made:
        await host.keeper.look()
        assert len(host.hired) == 1
    return made[0], made[1]


async def spec_of(versions: Versions) -> VersionSpec:
    return (await versions.specs())["v2"]


async def serve(client, group: str = "on-two") -> None:
    info = group_info(group, version="v2", weights_version="w2")
    await Scripts(client, KEYS).register_group(group, info, 600_000)


async def test_a_host_that_cannot_load_leaves_it_to_one_that_still_loads(
    hosts, versions, empty_redis, capsys
) -> None:
    one, two = hosts
    one.fail()
    for _ in range(3):
        await one.keeper.look()
        await two.keeper.look()
    spec = await spec_of(versions)
    assert (spec.state, spec.failures) == ("loading", {"one": WHY})
    assert two.gone == []
    assert len(one.hired) == 1
    (info,) = version_infos(MODEL, *await versions.read(), [], {})[1:]
    assert f"; it cannot be loaded on one: {WHY}" in _progress(info, 1, MODEL)
    await versions.set_state("v2", "ready")
    await serve(empty_redis)
    await one.keeper.look()
    (info,) = version_infos(MODEL, *await versions.read(), [], {})[1:]
    assert (info.state, info.failures) == ("ready", {"one": WHY})
    *_, said = await examine_versions(empty_redis, KEYS, (), ())
    assert f"version v2 cannot be loaded on one: {WHY}" in said.message
    capsys.readouterr()
    print_versions([info])
    assert f"{MODEL} v2: it cannot be loaded on one: {WHY}" in capsys.readouterr().err


async def test_it_has_failed_once_every_host_has(hosts, versions) -> None:
    for host in hosts:
        host.fail()
    for _ in range(2):
        for host in hosts:
            await host.keeper.look()
    spec = await spec_of(versions)
    assert spec.state == "failed"
    assert spec.reason == f"no host can load it. one: {WHY}. two: {WHY}."
    # Loaded again, all try.
    for host in hosts:
        await host.keeper.look()
    await wait_until(lambda: all(host.gone == host.hired for host in hosts))
    await VersionLife(hosts[0].keeper._client, MODEL, 1).begin_load("v2")
    assert (await spec_of(versions)).failures == {}
    for host in hosts:
        await host.keeper.look()
        assert len(host.hired) == 2


async def test_a_host_that_is_gone_is_not_waited_for(
    hosts, versions, empty_redis, monkeypatch
) -> None:
    one, _ = hosts
    one.fail()
    await one.keeper.look()
    assert (await spec_of(versions)).state == "loading"
    monkeypatch.setattr(version_hosts, "GONE_MS", -60_000)  # its sign is old
    await one.keeper.look()
    spec = await spec_of(versions)
    assert (spec.state, spec.reason) == ("failed", WHY)
    key = hosts_key(MODEL, "v2")
    assert 0 < await empty_redis.pttl(key) <= version_hosts.AWAY_MS


async def test_a_worker_that_restarts_is_not_ended_by_a_host_that_never_had_one(
    hosts, versions, empty_redis, monkeypatch
) -> None:
    one, two = hosts
    await versions.set_state("v2", "ready")
    await serve(empty_redis)
    one.fail()
    await one.keeper.look()
    await Scripts(empty_redis, KEYS).forfeit("on-two", "killed", counts=False)
    await two.keeper.look()
    await one.keeper.look()
    assert (await spec_of(versions)).state == "ready"
    assert two.gone == []
    # Nor is a host that is down for longer, as for a new kernel...
    monkeypatch.setattr(version_hosts, "GONE_MS", -60_000)
    await one.keeper.look()
    assert (await spec_of(versions)).state == "ready"
    # ...but one that never comes back.
    monkeypatch.setattr(version_hosts, "AWAY_MS", -60_000)
    await one.keeper.look()
    assert (await spec_of(versions)).state == "failed"


async def test_a_load_does_not_wait_for_a_host_that_is_away(
    hosts, versions, empty_redis
) -> None:
    """As one that has come back under another name."""
    one, _ = hosts
    await versions.set_state("v2", "ready")
    one.fail()
    await one.keeper.look()
    assert (await spec_of(versions)).state == "ready"
    away = {"two": (await spec_of(versions)).load_ms}
    await empty_redis.zadd(hosts_key(MODEL, "v2"), away, xx=True)
    await one.keeper.look()
    assert (await spec_of(versions)).state == "ready"
    await VersionLife(empty_redis, MODEL, 1).begin_load("v2")
    await one.keeper.look()
    await wait_until(lambda: len(one.gone) == 1)
    await one.keeper.look()
    one.fail()
    await one.keeper.look()
    assert (await spec_of(versions)).state == "failed"


async def test_a_version_is_tried_again_where_it_has_failed(
    hosts, versions, empty_redis
) -> None:
    one, two = hosts
    one.fail()
    await one.keeper.look()
    await versions.set_state("v2", "ready")
    await serve(empty_redis)
    await VersionLife(empty_redis, MODEL, 1).begin_load("v2")
    assert (await spec_of(versions)).failures == {}
    await one.keeper.look()
    await wait_until(lambda: len(one.gone) == 1)
    await one.keeper.look()
    await two.keeper.look()
    assert (len(one.hired), len(two.hired)) == (2, 1)
    one.fail()
    await one.keeper.look()
    spec = await spec_of(versions)
    assert (spec.state, spec.failures) == ("ready", {"one": WHY})


async def test_a_host_that_starts_anew_takes_back_what_it_has_said(
    hosts, versions, empty_redis, tmp_path
) -> None:
    hosts[0].fail()
    await hosts[0].keeper.look()
    assert (await spec_of(versions)).failures == {"one": WHY}
    again = Host(empty_redis, tmp_path / "again", "one")
    await again.keeper.look()
    assert (await spec_of(versions)).failures == {}
    assert len(again.hired) == 1


async def test_nobody_is_believed_to_be_alone_too_soon(
    versions, empty_redis, tmp_path, monkeypatch
) -> None:
    """One that cannot even place it may look before the others do."""
    monkeypatch.setattr(version_failures, "ALONE_S", 600.0)
    one, two = (Host(empty_redis, tmp_path / name, name) for name in ("one", "two"))
    one.plan_fails = True
    await one.keeper.look()
    await two.keeper.look()
    spec = await spec_of(versions)
    assert (spec.state, list(spec.failures)) == ("loading", ["one"])
    assert len(two.hired) == 1
    monkeypatch.setattr(version_failures, "ALONE_S", 0.0)
    two.fail()
    await two.keeper.look()
    assert (await spec_of(versions)).state == "failed"


async def test_a_host_that_finds_room_after_all_takes_back_what_it_has_said(
    hosts, versions
) -> None:
    one, two = hosts
    two.plan_fails = True
    await two.keeper.look()
    assert list((await spec_of(versions)).failures) == ["two"]
    two.plan_fails = False
    await two.keeper.look()
    assert (await spec_of(versions)).failures == {}
    two.fail()
    await two.keeper.look()
    assert (await spec_of(versions)).failures == {"two": WHY}
    assert one.gone == []


async def test_what_became_ready_meanwhile_is_not_loaded_again(
    versions, empty_redis, monkeypatch
) -> None:
    """Its worker has said that it is ready, and would not say so again."""
    life = VersionLife(empty_redis, MODEL, 1)
    await versions.set_state("v2", "stopped")
    keep_share = life.keep_share

    async def faster(version: str) -> None:
        await keep_share(version)
        await versions.set_state("v2", "ready")

    monkeypatch.setattr(life, "keep_share", faster)
    await life.begin_load("v2")
    assert (await spec_of(versions)).state == "ready"


async def cannot_load() -> None:
    raise MemoryError("no room")


async def test_a_worker_by_hand_speaks_for_itself_alone(
    hosts, versions, empty_redis
) -> None:
    model = ModelConfig(name=MODEL, version="v2")

    def by_hand() -> OwnVersion:
        keys = Keys(MODEL, 0)
        return OwnVersion(empty_redis, keys, model, 1, "a", supervised=False)

    failing = by_hand()
    await failing.begin()
    with pytest.raises(MemoryError):
        await failing.loaded(cannot_load())
    spec = await spec_of(versions)
    assert spec.state == "loading"
    assert list(spec.failures.values()) == ["no room"]
    slow = by_hand()
    await slow.begin()
    for host in hosts:
        host.fail()
    for _ in range(2):
        for host in hosts:
            await host.keeper.look()
    assert (await spec_of(versions)).state == "failed"
    await slow.ready()  # where nobody else could, it can
    spec = await spec_of(versions)
    assert (spec.state, list(spec.failures)) == ("ready", ["one", "two"])
