"""cancel, reap and forfeit, on both servers."""

import pytest
from msgspec import to_builtins
from support.leaks import leaked_keys
from support.shard_client import HOUR_MS, KEYS, Shard, delta

from tokenmill.shared.keys import lane_of
from tokenmill.shared.messages import CANCELLED, EXPIRED, JobError
from tokenmill.shared.script_endings import ending


@pytest.fixture
async def shard(redis_client):
    return await Shard(redis_client).open("g1", "g2")


@pytest.mark.parametrize("before", ["queued", "delayed", "dispatched", "retrying"])
async def test_a_job_that_no_engine_runs_is_cancelled_at_once(shard, before):
    if before == "retrying":
        job_id, epoch = await shard.run()
        await shard.fail(job_id, epoch)
    else:
        job_id = await shard.enqueue(
            delay_ms=HOUR_MS if before == "delayed" else 0,
            deadline_ms=2 * HOUR_MS,
            idempotency_key="k",
        )
    if before == "dispatched":
        await shard.dispatch(job_id)
    assert await shard.state(job_id) == before
    async with shard.client.pubsub() as pubsub:
        await pubsub.subscribe(KEYS.wake(job_id))
        assert (await pubsub.get_message(timeout=60))["type"] == "subscribe"
        assert await shard.scripts.cancel(job_id) == "cancelled"
        heard = (await pubsub.get_message(timeout=60))["data"]
    assert b'"state":"cancelled"' in heard
    assert await shard.scripts.cancel(job_id) == "cancelled"
    result = await shard.result(job_id)
    assert (result["state"], result["error"]) == ("cancelled", to_builtins(CANCELLED))
    assert result["timings"]["total_ms"] >= 0
    if before == "dispatched":
        assert (await shard.start(job_id, 1)).status == "cancelled"
    assert "jobs" not in await shard.scripts.load()
    assert [g.credit_blocks for g in await shard.scripts.groups()] == [1000, 1000]
    assert (
        await shard.client.xlen(KEYS.queue("interactive", "128", lane_of("default")))
        == 0
    )
    assert await leaked_keys(shard.client) == []


async def test_cancelling_a_running_job_tells_its_group_and_the_flag_is_seen(shard):
    job_id, epoch = await shard.run()
    async with shard.client.pubsub() as pubsub:
        await pubsub.subscribe(KEYS.control("g1"))
        assert (await pubsub.get_message(timeout=60))["type"] == "subscribe"
        assert await shard.scripts.cancel(job_id) == "cancelling"
        assert (await pubsub.get_message(timeout=60))["data"].decode() == job_id
    jobs = [(job_id, epoch)]
    renewed = await shard.scripts.renew(group="g1", lease_ms=1000, jobs=jobs)
    assert renewed == ["cancelled"]
    assert await shard.emit(job_id, epoch, 1, 0) == "cancelled"
    assert await shard.finish(job_id, epoch, 2, "cancelled") == "recorded"
    assert await shard.scripts.cancel(job_id) == "cancelled"


@pytest.mark.parametrize("way", ["fail", "release", "lease", "lease_alone"])
async def test_a_cancelled_job_never_runs_again(shard, way):
    job_id, epoch = await shard.run(alone=way == "lease_alone")
    assert await shard.scripts.cancel(job_id) == "cancelling"
    if way == "fail":
        assert await shard.fail(job_id, epoch) == "cancelled"
    elif way == "release":
        released = await shard.scripts.release(group="g1", jobs=[(job_id, epoch)])
        assert released == [True]
    else:
        await shard.overdue(KEYS.lease, job_id)
        assert (await shard.reap()).cancelled == 1
    assert await shard.state(job_id) == "cancelled"
    assert (await shard.result(job_id))["state"] == "cancelled"
    assert await leaked_keys(shard.client) == []


async def test_unknown_and_finished_jobs_answer_a_cancel(shard):
    assert await shard.scripts.cancel("tiny.0.0123456789abcdef") == "unknown"
    job_id, epoch = await shard.run()
    await shard.finish(job_id, epoch)
    assert await shard.scripts.cancel(job_id) == "succeeded"


async def test_a_lost_lease_fences_the_zombie_and_redelivers_with_the_log(shard):
    job_id, epoch = await shard.run("g1")
    await shard.emit(job_id, epoch, 1, 0)
    await shard.overdue(KEYS.lease, job_id)
    report = await shard.reap()
    assert (report.redelivered, report.dead) == (1, 0)
    assert await shard.emit(job_id, epoch, 2, 1) == "lost"
    assert await shard.finish(job_id, epoch) == "lost"
    ((_, entry),) = await shard.client.xrange(KEYS.resume)
    assert (entry[b"kind"], entry[b"losses"]) == (b"lease_lost", b"1")
    reply = await shard.dispatch(job_id, "g2", entry_key=KEYS.resume)
    started = await shard.start(job_id, reply.epoch, "g2")
    assert (started.log, started.lease_losses) == ((delta(0),), 1)
    ids = [entry for entry, _ in await shard.log(job_id)]
    assert ids == ["1-0", "1-1", "2-0", "3-0"]
    assert await shard.finish(job_id, reply.epoch, group="g2") == "recorded"


async def test_a_lease_lost_before_the_start_is_no_fault_of_the_job(shard):
    job_id = await shard.enqueue()
    await shard.dispatch(job_id)
    await shard.overdue(KEYS.lease, job_id)
    assert (await shard.reap()).redelivered == 1
    assert (await shard.scripts.job(job_id)).get("lease_losses") is None
    assert await shard.client.xlen(KEYS.work("g1")) == 0


@pytest.mark.parametrize("before", ["queued", "delayed", "dispatched", "running"])
async def test_a_deadline_ends_a_job_wherever_it_is(shard, before):
    delay = HOUR_MS if before == "delayed" else 0
    job_id = await shard.enqueue(deadline_ms=2 * HOUR_MS, delay_ms=delay)
    if before in ("dispatched", "running"):
        await shard.dispatch(job_id)
    if before == "running":
        await shard.start(job_id, 1)
        await shard.emit(job_id, 1, 1, 0)
    await shard.overdue(KEYS.deadline, job_id)
    assert (await shard.reap()).expired == 1
    assert await shard.state(job_id) == "expired"
    assert (await shard.result(job_id))["error"] == to_builtins(EXPIRED)
    assert await shard.finish(job_id, 1) == "lost"
    assert [g.credit_blocks for g in await shard.scripts.groups()] == [1000, 1000]
    if before == "running":
        last, end = (await shard.log(job_id))[-1]
        assert (last, end["end"]["state"]) == ("2-1", "expired")
    assert await leaked_keys(shard.client) == []


async def test_forfeit_gives_a_dead_groups_jobs_back_at_the_next_reap(shard):
    one, _ = await shard.run("g1")
    two, _ = await shard.run("g2")
    assert await shard.scripts.forfeit("g1") == 1
    assert (await shard.reap()).redelivered == 1
    assert [await shard.state(j) for j in (one, two)] == ["queued", "running"]
    assert [g.group for g in await shard.scripts.groups()] == ["g2"]


async def test_members_that_belong_to_nothing_are_swept(shard):
    job_id = await shard.enqueue()
    await shard.client.zadd(KEYS.lease, {"garbage": 1, b"\xff": 1, job_id: 1})
    await shard.client.zadd(KEYS.delayed, {job_id: 1})
    await shard.client.set(KEYS.job("garbage"), "not a hash")
    for _ in range(2):
        await shard.reap()
    assert await shard.client.zrange(KEYS.lease, 0, -1) == []
    assert await shard.client.zcard(KEYS.delayed) == 0
    assert await shard.state(job_id) == "queued"


async def test_silent_groups_are_forgotten_once_their_hash_has_expired(shard):
    await shard.client.zadd(KEYS.groups, {"g1": 1, "ghost": 1})
    await shard.client.xadd(KEYS.work("ghost"), {"id": "x"})
    assert (await shard.reap()).groups == 1
    assert await shard.client.zscore(KEYS.groups, "g1") == 1
    assert not await shard.client.exists(KEYS.work("ghost"))


def test_an_ending_for_a_strangers_id_can_still_be_built():
    result, end = ending("nonsense", "failed", JobError("internal_error", "why"))
    assert b'"state":"failed"' in result
    assert b'"message":"why"' in end
