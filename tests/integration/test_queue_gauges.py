"""What a scrape shows of queues and runs: exact, from the start, and never old."""

from typing import TYPE_CHECKING, cast

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from tokenmill.scheduler import shown
from tokenmill.scheduler.shown import QueueGauges, RunGauges, note_active
from tokenmill.scheduler.webhook_delivery import Deliverer
from tokenmill.shared.config import Config, ModelConfig, TenantConfig, WebhooksConfig
from tokenmill.shared.keys import SHARDS, Keys
from tokenmill.shared.metrics import catalog, labels

if TYPE_CHECKING:
    from tokenmill.scheduler.webhook_transport import Poster

KEYS = Keys("m", 0)
CLASSES = ("interactive", "bulk")
BUCKETS = ("128", "512", "2048", "8192", "beyond")
SERIES = (
    *(catalog.QUEUE_JOBS, catalog.TENANT_JOBS, catalog.LEFT_OUT, catalog.BULK_RUNS),
    *(catalog.DISPATCHED, catalog.LEASES_LOST, catalog.DEAD, catalog.REQUESTS),
    catalog.WEBHOOKS,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instruments as in a process that has just started."""
    monkeypatch.setattr(labels, "_known", {"m"})
    monkeypatch.setattr(shown, "_ACTIVE", {})
    for one in SERIES:
        monkeypatch.setattr(one, "values", {})


@pytest.fixture
def config() -> Config:
    return Config(
        models=(ModelConfig(name="m"),), tenants={"acme": TenantConfig(weight=2)}
    )


async def fill(client: "redis.asyncio.Redis", tenants: int, lanes: int) -> int:
    """Jobs of that many tenants in all lanes; how many there are."""
    jobs = len(CLASSES) * len(BUCKETS) * lanes
    load = {"jobs": jobs}
    for name in [*(f"t{n}" for n in range(tenants)), "acme"]:
        load[f"tenant:{name}:jobs"] = 3
    pipe = client.pipeline(transaction=False)
    pipe.sadd(SHARDS, KEYS.shard)
    pipe.hset(KEYS.load, mapping=load)
    for job_class in CLASSES:
        for bucket in BUCKETS:
            for lane in range(lanes):
                name = f"{job_class}:{bucket}:{lane}"
                pipe.xadd(f"{KEYS.prefix}q:{name}", {"id": "x"})
                pipe.zadd(KEYS.lanes, {name: 1000 + lane})
    await pipe.execute()
    return jobs


async def test_many_tenants_and_lanes_are_counted_exactly(redis_client, config) -> None:
    jobs = await fill(redis_client, tenants=700, lanes=256)
    note_active(KEYS.shard, True)
    await QueueGauges(redis_client, config)()
    assert sum(catalog.QUEUE_JOBS.values.values()) == jobs
    assert catalog.TENANT_JOBS.values == {("acme",): 3, ("other",): jobs - 3}
    assert set(catalog.LEFT_OUT.values.values()) == {0}


async def test_what_is_too_much_to_count_is_told(
    redis_client, config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "MOST_LANES", 16)
    await fill(redis_client, tenants=1, lanes=2)
    note_active(KEYS.shard, True)
    await QueueGauges(redis_client, config)()
    told = catalog.LEFT_OUT.values
    assert told == {("lanes",): 1, ("shards",): 0, ("groups",): 0}


@pytest.mark.parametrize("active", [True, False, None])
async def test_counters_are_there_before_the_first_event(
    redis_client, config, active: bool | None
) -> None:
    """Of a model in the settings, and of a shard that is led or stood by for."""
    if active is not None:
        note_active(KEYS.shard, active)
    await QueueGauges(redis_client, config)()
    assert catalog.DISPATCHED.values == {("m", name): 0 for name in CLASSES}
    assert catalog.LEASES_LOST.values == catalog.DEAD.values == {("m",): 0}
    states = ("succeeded", "failed", "cancelled", "expired")
    assert catalog.REQUESTS.values == {("m", state): 0 for state in states}


async def test_webhooks_are_counted_from_zero(redis_client) -> None:
    Deliverer(redis_client, WebhooksConfig(), cast("Poster", None))
    outcomes = ("delivered", "retried", "given_up")
    assert catalog.WEBHOOKS.values == {(one,): 0 for one in outcomes}


async def test_runs_of_before_are_not_shown_when_redis_is_away(
    redis_client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauges = RunGauges(redis_client)
    await gauges()
    assert set(catalog.BULK_RUNS.values.values()) == {0}

    async def away(*_: object, **__: object) -> None:
        raise RedisConnectionError("away")

    monkeypatch.setattr(shown, "list_runs", away)
    with pytest.raises(RedisConnectionError):
        await gauges()
    assert catalog.BULK_RUNS.values == {}
