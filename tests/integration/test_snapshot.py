"""Snapshots of a pool: what they say, what they cost, and that nothing upsets them."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from support.scheduled_pool import KEYS, Pool, new_job, scheduling
from support.servers import RedisServer
from support.waiting import wait_until

from tokenmill import Client
from tokenmill.scheduler.history import Sampler
from tokenmill.shared.keys import HISTORY, PROCESSES, SHARDS, Keys, process_key
from tokenmill.shared.watch.reading import MOST_LANES, PoolReader
from tokenmill.shared.watch.replies import pipelined
from tokenmill.shared.watch.snapshot import PoolSnapshot


@pytest.fixture
async def pool(redis_client) -> Pool:
    return Pool(redis_client)


@pytest.fixture
async def mill(redis_server: RedisServer) -> AsyncIterator[Client]:
    async with Client(redis_server.url) as client:
        yield client


def depths(seen: PoolSnapshot) -> dict[tuple[str, str], int]:
    return {(queue.job_class, queue.bucket): queue.jobs for queue in seen.queues}


async def test_an_empty_redis_has_an_empty_snapshot(mill, redis_client) -> None:
    seen = await mill.snapshot()
    assert seen.at_ms > 0
    assert (seen.queues, seen.groups, seen.processes, seen.left_out) == ((),) * 4
    assert [(one.name, one.jobs) for one in seen.classes] == [
        ("interactive", 0),
        ("bulk", 0),
    ]
    assert await mill.history() == []


async def test_queues_classes_and_tenants_add_up(pool: Pool, mill: Client) -> None:
    await pool.enqueue(
        *(new_job("x" * 10, tenant="a") for _ in range(3)),
        *(new_job("x" * 300, tenant="b", job_class="bulk") for _ in range(2)),
        new_job("x", tenant="b", delay_ms=60_000),
    )
    seen = await mill.snapshot()
    assert depths(seen) == {("interactive", "128"): 3, ("bulk", "512"): 2}
    assert all(0 <= q.oldest_ms < 60_000 for q in seen.queues)
    assert seen.oldest_ms == max(q.oldest_ms for q in seen.queues)
    assert (seen.waiting_jobs, seen.waiting_tokens, seen.delayed) == (5, 630, 1)
    interactive, bulk = seen.classes
    assert (interactive.jobs, interactive.tokens, interactive.later_jobs) == (3, 30, 1)
    assert (bulk.jobs, bulk.tokens, bulk.later_jobs) == (2, 600, 0)
    assert [(t.name, t.jobs, t.later_jobs) for t in seen.tenants] == [
        ("a", 3, 0),
        ("b", 2, 1),
    ]
    assert [(one.model, one.active) for one in seen.schedulers] == [("tiny", None)]


async def test_running_and_ended_jobs_show(pool: Pool, mill: Client) -> None:
    async with scheduling(pool.client):
        await pool.group(max_running=4)
        await pool.enqueue(*(new_job() for _ in range(3)))
        started = await pool.work(3)
        seen = await mill.snapshot()
        (group,) = seen.groups
        assert (group.group, group.state, group.max_running) == ("w-1", "ready", 4)
        assert (seen.leased, seen.waiting_jobs, seen.queues) == (3, 0, ())
        assert seen.schedulers[0].active is not None
        assert seen.latency.jobs == 0
        await pool.finish(started)
        ended = await mill.snapshot()
    assert ended.leased == 0
    assert ended.latency.jobs == 3 == ended.latency_by_class["interactive"].jobs
    assert ended.latency.total_p50_ms is not None
    assert ended.latency.total_p50_ms <= ended.latency.total_p99_ms
    assert ended.rates.jobs_per_s == pytest.approx(0.3)
    # What ended is read once: the record may go, the snapshot stays right.
    await pool.client.delete(*(KEYS.job(one.job_id) for one in started))
    assert (await mill.snapshot()).latency == ended.latency


async def test_three_round_trips_and_a_bound_however_much_there_is(
    pool: Pool,
) -> None:
    lanes = {f"interactive:128:{lane}": 1 for lane in range(MOST_LANES + 50)}
    await pool.enqueue(new_job())
    await pool.client.zadd(KEYS.lanes, lanes)
    await pool.client.zadd(KEYS.groups, {f"w-{n}": 1 for n in range(400)})
    await pool.client.hset(
        KEYS.load, mapping={f"tenant:t{n}:jobs": 1 for n in range(5000)}
    )
    trips: list[int] = []
    read = pipelined(pool.client)

    async def counted(*commands):
        trips.append(len(commands))
        return await read(*commands)

    seen = await PoolReader(counted).snapshot()
    assert len(trips) == 3
    assert max(trips) < 2500
    assert {"lanes", "groups", "tenants"} <= set(seen.left_out)
    assert len(seen.groups) <= 256
    assert len(seen.tenants) <= 64


async def test_what_strangers_wrote_spoils_nothing(pool: Pool, mill: Client) -> None:
    client = pool.client
    await pool.enqueue(new_job())
    other = Keys("odd", 0)
    await client.sadd(SHARDS, "odd:0", "no shard", b"\xff\xfe")
    await client.set(other.load, "a string")
    await client.lpush(other.lanes, "a list")
    await client.set(other.done, "x")
    await client.zadd(other.groups, {"w-x": 1, "w-y": 2})
    await client.hset(other.group("w-x"), "total_blocks", "many")
    await client.set(other.group("w-y"), "no hash")
    await client.hset(KEYS.load, mapping={"tenant:a:jobs": "none", "jobs": "1"})
    await client.xadd(KEYS.done, {"id": "no job", "state": "odd"})
    await client.zadd(PROCESSES, {"worker:x": 1, b"\xff": 2})
    await client.set(process_key("worker:x"), "{")
    seen = await mill.snapshot()
    assert seen.waiting_jobs == 1
    assert depths(seen) == {("interactive", "128"): 1}
    assert {(g.group, g.state) for g in seen.groups} == {
        ("w-x", "silent"),
        ("w-y", "silent"),
    }
    assert seen.processes == ()


async def test_history_has_a_sample_for_each_slot_from_many_janitors(
    pool: Pool, mill: Client
) -> None:
    await pool.enqueue(*(new_job() for _ in range(2)))
    samplers = [Sampler(pool.client, every_ms=100) for _ in range(2)]
    tasks = [asyncio.create_task(sampler.run()) for sampler in samplers]

    async def there() -> bool:
        return len(await mill.history()) >= 4

    try:
        await wait_until(there, what="samples")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    samples = await mill.history()
    times = [sample.at_ms // 100 for sample in samples]
    assert times == sorted(set(times))
    assert samples[-1].waiting == {"interactive": 2, "bulk": 0}
    assert samples[-1].ttft_p50_ms is None
    assert [s.at_ms for s in await mill.history(2)] == [s.at_ms for s in samples[-2:]]


async def test_history_is_bounded_and_skips_strangers(pool: Pool, mill: Client) -> None:
    pipe = pool.client.pipeline()
    for n in range(400):
        pipe.xadd(HISTORY, {"s": "{}" if n % 2 else "no json"}, id=f"{n + 1}-1")
    await pipe.execute()
    await Sampler(pool.client).sample()
    assert await pool.client.xlen(HISTORY) == 360
    (sample,) = await mill.history()
    assert sample.waiting == {"interactive": 0, "bulk": 0}


@pytest.mark.parametrize("score", [float("inf"), float("-inf"), 1e300, -1e300])
async def test_scores_that_are_no_times_upset_nothing(
    redis_client, mill: Client, score: float
) -> None:
    await redis_client.sadd(SHARDS, KEYS.shard)
    await redis_client.zadd(KEYS.lanes, {"interactive:128:0": score})
    await redis_client.zadd(KEYS.groups, {"g": score})
    await redis_client.xadd(KEYS.queue("interactive", "128", "0"), {"id": "x"})
    await redis_client.hset(KEYS.load, "jobs", 10**30)
    seen = await mill.snapshot()
    assert depths(seen) == {("interactive", "128"): 1}
    assert msgspec.json.encode(seen)
