"""After a flush, whoever still uses a shard brings it back into `tm:shards`."""

from types import SimpleNamespace
from typing import Any, cast

import redis.asyncio
from support.scheduled_pool import CARD
from support.shard_client import KEYS, Shard

from tokenmill.shared import script_runner
from tokenmill.shared.keys import SHARDS
from tokenmill.workers.jobs import JobTable
from tokenmill.workers.registration import Registration


async def test_a_worker_does_so_with_its_cards(
    redis_client: "redis.asyncio.Redis",
) -> None:
    nothing = cast("Any", None)
    made = Registration(
        client=redis_client,
        scripts=Shard(redis_client).scripts,
        keys=KEYS,
        spec=cast("Any", SimpleNamespace(card=CARD, bundle=None, version="v1")),
        lease_ms=60_000,
        table=JobTable(),
        capacity=nothing,
        clock=nothing,
        outage=nothing,
        on_lost=nothing,
        on_cancelled=nothing,
    )
    await made._publish_cards()
    assert await made._cards_are_there()
    await redis_client.delete(SHARDS)
    assert not await made._cards_are_there()
    await made._publish_cards()
    assert await redis_client.smembers(SHARDS) == {KEYS.shard.encode()}  # type: ignore[misc]


async def test_a_client_does_so_before_long(
    redis_client: "redis.asyncio.Redis", monkeypatch
) -> None:
    shard = Shard(redis_client)
    await shard.enqueue()
    await redis_client.flushall()
    monkeypatch.setattr(script_runner, "REGISTER_S", 0.0)
    await shard.enqueue()
    assert await redis_client.smembers(SHARDS) == {KEYS.shard.encode()}  # type: ignore[misc]
