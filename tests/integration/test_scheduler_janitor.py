"""Housekeeping, and the arq worker that runs it."""

import asyncio

import pytest
import redis.asyncio
from redis.asyncio.connection import Connection
from support.servers import RedisServer
from support.shard_client import Shard
from support.waiting import wait_until

from tokenmill.scheduler.books import mend_books
from tokenmill.scheduler.housekeeping import forget_groups, mend_orphans, trim
from tokenmill.scheduler.orchestrator import supervise
from tokenmill.shared.config import Config
from tokenmill.shared.keys import JobId, Keys, new_unique
from tokenmill.shared.messages import JobRequest, encode
from tokenmill.shared.scripts import GroupInfo, NewJob, Scripts

KEYS = Keys("tiny", 0)


async def enqueue(client: "redis.asyncio.Redis", **fields: int) -> str:
    job = NewJob(
        id=JobId("tiny", 0, new_unique()),
        payload=encode(JobRequest(text="x")),
        payload_hash="h",
        job_class="interactive",
        tenant="t",
        bucket="128",
        tokens=1,
        max_tokens=1,
        seed=1,
        keep_ms=60_000,
        **fields,  # type: ignore[arg-type]
    )
    await Scripts(client, KEYS).enqueue([job])
    return str(job.id)


async def test_old_dead_letters_go_and_new_ones_stay(
    redis_client: "redis.asyncio.Redis",
):
    await redis_client.xadd(KEYS.dead, {"reason": "old"}, id="1000-0")
    seconds, _ = await redis_client.time()
    recent = int(seconds) * 1000 - 3_540_000
    await redis_client.xadd(KEYS.dead, {"reason": "recent"}, id=f"{recent}-0")
    assert (await trim(redis_client, KEYS, 3_600_000))["dead_letters"] == 1
    [(_, left)] = await redis_client.xrange(KEYS.dead)
    assert left == {b"reason": b"recent"}
    assert (await trim(redis_client, KEYS, 3_500_000))["dead_letters"] == 1
    assert not await redis_client.xlen(KEYS.dead)


async def test_only_groups_that_are_gone_are_forgotten(
    redis_client: "redis.asyncio.Redis",
):
    info = GroupInfo(
        group="w-live",
        total_blocks=1,
        max_running=1,
        batch_tokens=1,
        block_size=8,
        max_context=8,
        weights_version="w",
    )
    await Scripts(redis_client, KEYS).register_group("w-live", info, ttl_ms=60_000)
    await redis_client.zadd(KEYS.groups, {"w-live": 1, "w-gone": 1})
    await redis_client.xadd(KEYS.work("w-gone"), {"id": "x"})
    assert await forget_groups(redis_client, KEYS) == 1
    assert await redis_client.zrange(KEYS.groups, 0, -1) == [b"w-live"]
    assert not await redis_client.exists(KEYS.work("w-gone"))


async def test_a_queued_job_without_its_entry_is_queued_again(
    redis_client: "redis.asyncio.Redis",
):
    lost, fine = await enqueue(redis_client), await enqueue(redis_client)
    scripts = Scripts(redis_client, KEYS)
    record = await scripts.job(lost)
    assert record is not None
    await redis_client.xdel(record["entry_key"], record["entry"])
    assert await mend_orphans(redis_client, KEYS) == {"queued": 1}
    [(entry, fields)] = await redis_client.xrange(KEYS.resume)
    assert fields[b"id"].decode() == lost
    record = await scripts.job(lost)
    assert record is not None
    assert (record["entry"], record["entry_key"]) == (entry.decode(), KEYS.resume)
    assert await mend_orphans(redis_client, KEYS) == {}
    assert await scripts.cancel(lost) == "cancelled"
    assert await redis_client.xlen(KEYS.resume) == 0
    assert await scripts.cancel(fine) == "cancelled"


@pytest.mark.parametrize(
    ("state", "place"),
    [("running", "lease"), ("dispatched", "lease"), ("retrying", "delayed")],
)
async def test_a_job_without_its_due_time_gets_one(
    redis_client: "redis.asyncio.Redis", state: str, place: str
):
    job_id = await enqueue(redis_client)
    await redis_client.hset(KEYS.job(job_id), "state", state)  # type: ignore[misc]
    assert await mend_orphans(redis_client, KEYS) == {state: 1}
    assert await redis_client.zscore(getattr(KEYS, place), job_id) is not None
    assert await mend_orphans(redis_client, KEYS) == {}


async def test_a_delayed_job_is_no_orphan(redis_client: "redis.asyncio.Redis"):
    await enqueue(redis_client, delay_ms=60_000)
    assert await mend_orphans(redis_client, KEYS) == {}


@pytest.mark.parametrize("books", ["right", "wrong"])
async def test_books_become_what_the_jobs_hold(
    redis_client: "redis.asyncio.Redis", books: str
):
    shard = await Shard(redis_client).open("g1", "g2")
    await shard.run("g1", job_class="bulk")
    job_id, epoch = await shard.run("g1")
    await shard.emit(job_id, epoch, 1, 0)
    suspect, _ = await shard.run("g2", alone=True)
    before = await shard.scripts.groups()
    if books == "wrong":
        spoilt = {"credit_blocks": 3, "bulk_tokens": -4, "alone": job_id}
        for group in ("g1", "g2"):
            await redis_client.hset(KEYS.group(group), mapping=spoilt)  # type: ignore[misc, arg-type]
    assert await mend_books(redis_client, KEYS) == (2 if books == "wrong" else 0)
    assert await shard.scripts.groups() == before
    assert before[1].alone == suspect


async def test_a_job_that_a_stranger_deleted_blocks_its_group_no_longer(
    redis_client: "redis.asyncio.Redis",
):
    shard = await Shard(redis_client).open("g1")
    (before,) = await shard.scripts.groups()
    job_id, _ = await shard.run(alone=True)
    await redis_client.delete(KEYS.job(job_id))
    assert await mend_books(redis_client, KEYS) == 1
    assert await shard.scripts.groups() == [before]


async def test_sweeps_cost_round_trips_by_the_page_and_not_by_the_job(
    redis_client: "redis.asyncio.Redis",
):
    shard = await Shard(redis_client).open(*(f"g{i}" for i in range(8)))
    for i in range(8):
        await shard.run(f"g{i}")
    for _ in range(100):
        await enqueue(redis_client)
    calls = 0
    execute = Connection.send_packed_command

    async def counted(self: Connection, *args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        await execute(self, *args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send_packed_command", counted)
        assert await mend_orphans(redis_client, KEYS) == {}
        assert await mend_books(redis_client, KEYS) == 0
    assert calls < 20


async def test_a_suspect_that_lost_its_place_stays_one(
    redis_client: "redis.asyncio.Redis",
):
    shard = await Shard(redis_client).open("g1")
    job_id, _ = await shard.run()
    await shard.overdue(KEYS.lease, job_id)
    await shard.reap()
    await redis_client.delete(KEYS.resume)
    assert await mend_orphans(redis_client, KEYS) == {"queued": 1}
    ((_, entry),) = await redis_client.xrange(KEYS.resume)
    assert entry[b"losses"] == b"1"


async def test_arq_runs_the_tasks_and_uses_no_pickle(
    redis_client: "redis.asyncio.Redis", redis_server: RedisServer
):
    job_id = await enqueue(redis_client)
    record = await Scripts(redis_client, KEYS).job(job_id)
    assert record is not None
    await redis_client.xdel(record["entry_key"], record["entry"])
    janitor = asyncio.create_task(supervise(redis_server.url, Config()))

    async def mended() -> bool:
        return await redis_client.xlen(KEYS.resume) == 1

    try:
        await wait_until(mended, what="the mended orphan")
    finally:
        janitor.cancel()
        await asyncio.gather(janitor, return_exceptions=True)
    for name in await redis_client.keys("arq:job:*"):
        held = await redis_client.get(name) or b""  # it may expire meanwhile
        assert not held.startswith(b"\x80\x05")
    assert await redis_client.keys("arq:result:*") == []
