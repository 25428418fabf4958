"""Adapters that Redis has lost are registered again by who has seen them."""

import pytest
from support.adapter_pool import CONFIG, MODEL
from support.scheduled_pool import scheduling
from support.waiting import wait_until

from tokenmill.scheduler import adapter_keeping, shard
from tokenmill.scheduler.adapter_keeping import AdapterKeeper
from tokenmill.shared.adapter_keys import adapters_key, mark_key
from tokenmill.shared.adapters import AdapterCard
from tokenmill.shared.adapters_mark import is_lost, next_mark
from tokenmill.shared.adapters_registry import AdapterRegistry
from tokenmill.shared.errors import ProtocolError, UnknownAdapter
from tokenmill.shared.keys import SHARDS, Keys
from tokenmill.shared.messages import AdapterRef

OLD, NEW = "a" * 64, "b" * 64


def card(name: str, digest: str = OLD, tenant: str | None = None) -> AdapterCard:
    return AdapterCard(
        name=name,
        model=MODEL,
        path=f"/adapters/{name}",
        digest=digest,
        rank=4,
        alpha=8.0,
        bytes=100,
        tenant=tenant,
    )


@pytest.fixture
def registry(empty_redis) -> AdapterRegistry:
    return AdapterRegistry(empty_redis, MODEL)


@pytest.fixture
def keeper(empty_redis) -> AdapterKeeper:
    return AdapterKeeper(empty_redis, MODEL)


async def names(registry: AdapterRegistry) -> list[str]:
    return [one.name for one in await registry.cards()]


async def test_a_scheduler_registers_what_redis_has_lost(
    empty_redis, registry, monkeypatch
) -> None:
    looks: list[AdapterKeeper] = []

    class Counted(AdapterKeeper):
        async def follow(self) -> None:
            await super().follow()
            looks.append(self)

    monkeypatch.setattr(shard, "ADAPTERS_EVERY_S", 0.02)
    monkeypatch.setattr(shard, "AdapterKeeper", Counted)
    await empty_redis.sadd(SHARDS, Keys(MODEL, 0).shard)
    async with scheduling(empty_redis, CONFIG):
        kept = await registry.add(card("tone", tenant="acme"))
        first = len(looks)
        # One may have been under way.
        await wait_until(lambda: len(looks) >= first + 2, what="a look")
        await empty_redis.flushall()

        async def is_back() -> bool:
            return await registry.card("tone") == kept

        await wait_until(is_back, what="the lost adapter")


async def test_all_of_it_comes_back_as_it_was(keeper, registry, empty_redis) -> None:
    await registry.add(card("replaced"))
    await registry.add(card("replaced", NEW), replace=True)
    await registry.add(card("removed"))
    await registry.remove("removed")
    await keeper.follow()
    before = await empty_redis.hgetall(adapters_key(MODEL))
    assert len(before) == 3
    await empty_redis.flushall()
    await keeper.follow()
    assert await empty_redis.hgetall(adapters_key(MODEL)) == before
    assert (await registry.standing(AdapterRef("replaced", OLD))).retired is not None
    mark = await empty_redis.get(mark_key(MODEL))
    await keeper.follow()
    assert await empty_redis.get(mark_key(MODEL)) == mark


async def test_what_was_changed_meanwhile_goes_before(
    keeper, registry, empty_redis
) -> None:
    for name in ("tone", "other", "gone"):
        await registry.add(card(name))
    await keeper.follow()
    await empty_redis.flushall()
    await registry.add(card("tone", NEW))  # somebody was faster
    await registry.add(card("gone"))
    await registry.remove("gone")
    await keeper.follow()
    assert await names(registry) == ["other", "tone"]
    assert (await registry.card("tone")).digest == NEW


async def test_what_is_removed_on_purpose_stays_away(
    keeper, registry, empty_redis
) -> None:
    for name in ("tone", "broken", "other"):
        await registry.add(card(name))
    await keeper.follow()
    await registry.remove("tone")
    await keeper.follow()
    await empty_redis.hset(adapters_key(MODEL), "broken", b"no card")
    await registry.change(lambda *_: (None, {"broken": b"still none"}))
    await keeper.follow()
    await empty_redis.hdel(adapters_key(MODEL), "broken")  # as its error advises
    await registry.add(card("new"))
    await keeper.follow()
    assert await names(registry) == ["new", "other"]
    await empty_redis.flushall()
    await keeper.follow()
    assert await names(registry) == ["new", "other"]
    with pytest.raises(UnknownAdapter):
        await registry.remove("tone")


async def test_two_schedulers_write_it_once(empty_redis, registry) -> None:
    one, two = AdapterKeeper(empty_redis, MODEL), AdapterKeeper(empty_redis, MODEL)
    await registry.add(card("tone"))
    for keeper in (one, two):
        await keeper.follow()
    await empty_redis.flushall()
    for keeper in (one, two, one):
        await keeper.follow()
    assert (await empty_redis.get(mark_key(MODEL))).endswith(b":1")
    assert await names(registry) == ["tone"]


async def test_registered_by_a_release_without_marks(
    keeper, registry, empty_redis
) -> None:
    await registry.add(card("tone"))
    await empty_redis.delete(mark_key(MODEL))
    await keeper.follow()
    await empty_redis.flushall()
    await keeper.follow()
    assert await names(registry) == ["tone"]


async def test_what_such_a_release_removes_stays_away(
    keeper, registry, empty_redis, monkeypatch
) -> None:
    monkeypatch.setattr(adapter_keeping, "READ_AGAIN_S", 0.0)
    await registry.add(card("tone"))
    await keeper.follow()
    await empty_redis.hdel(adapters_key(MODEL), "tone")
    await keeper.follow()
    await empty_redis.flushall()
    await keeper.follow()
    assert await names(registry) == []


async def test_a_model_without_adapters_writes_nothing(keeper, empty_redis) -> None:
    for _ in range(2):
        await keeper.follow()
    assert await empty_redis.dbsize() == 0


def test_a_mark_rises_in_its_epoch() -> None:
    first = next_mark(None).encode()
    second = next_mark(first).encode()
    assert not is_lost(first, second)
    assert is_lost(second, first)
    assert is_lost(first, next_mark(None).encode())
    assert is_lost(first, None)
    with pytest.raises(ProtocolError, match="adapters-mark"):
        next_mark(b"7")
