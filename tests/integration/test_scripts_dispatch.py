"""Leadership, groups, credit and dispatch, on both servers."""

import pytest
from support.shard_client import HOUR_MS, KEYS, Shard, ending_of, group_info
from support.waiting import wait_until

from tokenmill.shared.keys import lane_of
from tokenmill.shared.messages import Delta, encode
from tokenmill.shared.scripts import DispatchItem, EmitItem

LANE = KEYS.queue("interactive", "128", lane_of("default"))


@pytest.fixture
async def shard(redis_client):
    return await Shard(redis_client).open("g1")


async def test_one_scheduler_is_active_and_fences_only_rise(shard):
    scripts = shard.scripts
    first = shard.fence
    assert await scripts.acquire_scheduler("standby", 50) is None
    assert await scripts.acquire_scheduler("scheduler", 20) == first
    second = await wait_until(lambda: scripts.acquire_scheduler("standby", HOUR_MS))
    assert second == first + 1
    assert await scripts.acquire_scheduler("scheduler", HOUR_MS) is None
    assert await scripts.release_scheduler("scheduler") is False
    assert await scripts.release_scheduler("standby") is True
    assert await scripts.acquire_scheduler("scheduler", HOUR_MS) == first + 2


async def test_a_flush_does_not_bring_an_old_fence_back(shard, redis_client):
    await redis_client.hset(KEYS.scheduler, "fence", 7)  # long ago, after few starts
    await redis_client.flushall()
    assert await shard.scripts.acquire_scheduler("scheduler", HOUR_MS) > 7


async def test_a_deposed_scheduler_changes_nothing(shard):
    job_id = await shard.enqueue()
    await shard.overdue(KEYS.deadline, job_id)
    shard.fence -= 1
    result, end = ending_of(job_id, "failed")
    rejected = await shard.scripts.reject(
        fence=shard.fence, job_id=job_id, state="failed", result=result, end=end
    )
    assert (await shard.dispatch(job_id)).status == "fenced"
    assert rejected is False
    assert await shard.state(job_id) == "queued"
    running, _ = await Shard.run(await Shard(shard.client).open("g1"))
    await shard.overdue(KEYS.lease, running)
    assert (await shard.reap()).fenced
    assert await shard.state(running) == "running"


async def test_dispatch_moves_the_entry_and_debits_the_group(shard):
    job_id = await shard.enqueue()
    reply = await shard.dispatch(job_id, tokens=12, cost_blocks=4)
    assert (reply.status, reply.epoch) == ("dispatched", 1)
    record = await shard.scripts.job(job_id)
    assert (record["state"], record["owner"], record["tokens"]) == (
        *("dispatched", "g1"),
        "12",
    )
    assert await shard.client.xlen(LANE) == 0
    assert await shard.client.zcard(KEYS.lanes) == 0
    ((_, work),) = await shard.client.xrange(KEYS.work("g1"))
    assert (work[b"id"].decode(), work[b"epoch"]) == (job_id, b"1")
    assert await shard.client.get(KEYS.ids(job_id)) == b"\1\0\0\0" * 12
    assert await shard.client.zscore(KEYS.lease, job_id) > 0
    (group,) = await shard.scripts.groups()
    credit = (group.credit_blocks, group.credit_running, group.credit_tokens)
    assert credit == (996, 99, 4084)
    load = await shard.scripts.load()
    assert "jobs" not in load
    assert load["drained_tokens"] == "10"


async def test_a_repeated_dispatch_of_the_same_batch_changes_nothing(shard):
    job_id = await shard.enqueue()
    item = DispatchItem(
        job_id=job_id, tokens=5, token_ids=b"", cost_blocks=2, bucket="128"
    )
    call = {"group": "g1", "batch": "b", "lease_ms": 1000, "items": [item]}
    call["fence"] = shard.fence
    first = await shard.scripts.dispatch(**call)
    again = await shard.scripts.dispatch(**call)
    assert first == again
    assert first[0].status == "dispatched"
    assert await shard.client.xlen(KEYS.work("g1")) == 1
    assert (await shard.scripts.groups())[0].credit_blocks == 998


async def test_what_cannot_be_dispatched_is_said_item_by_item(shard):
    cancelled, expired, fine, gone = [await shard.enqueue() for _ in range(3)] + ["x"]
    await shard.scripts.cancel(cancelled)
    await shard.client.hset(KEYS.job(expired), "deadline", "1")
    stray = await shard.client.xadd(LANE, {"id": "x"})
    items = [
        DispatchItem(
            job_id=job_id,
            tokens=1,
            token_ids=b"",
            cost_blocks=1,
            bucket="128",
            entry_key=LANE,
            entry_id=stray.decode() if job_id == gone else "",
        )
        for job_id in (cancelled, expired, gone, fine)
    ]
    replies = await shard.scripts.dispatch(
        fence=shard.fence, group="g1", batch="b", lease_ms=1000, items=items
    )
    statuses = [reply.status for reply in replies]
    assert statuses == ["cancelled", "expired", "gone", "dispatched"]
    assert stray not in [entry for entry, _ in await shard.client.xrange(LANE)]


@pytest.mark.parametrize(
    "room", [{"total_blocks": 7}, {"max_running": 1}, {"batch_tokens": 23}]
)
async def test_each_kind_of_credit_stops_the_second_job(redis_client, room):
    shard = await Shard(redis_client).open("g1", **room)
    first, second = [await shard.enqueue() for _ in range(2)]
    assert (await shard.dispatch(first)).status == "dispatched"
    assert (await shard.dispatch(second)).status == "no_credit"
    assert await shard.state(second) == "queued"
    epoch = 1
    await shard.start(first, epoch)
    assert await shard.finish(first, epoch) == "recorded"
    assert (await shard.dispatch(second)).status == "dispatched"


async def test_a_prompt_beyond_the_token_budget_goes_alone(redis_client):
    shard = await Shard(redis_client).open("g1", batch_tokens=10)
    small, large = [await shard.enqueue() for _ in range(2)]
    assert (await shard.dispatch(small, tokens=1)).status == "dispatched"
    assert (await shard.dispatch(large, tokens=50)).status == "no_credit"
    await shard.scripts.release(group="g1", jobs=[(small, 1)])
    assert (await shard.dispatch(large, tokens=50)).status == "dispatched"
    assert (await shard.dispatch(small, tokens=1)).status == "no_credit"


async def test_each_choice_takes_a_slot_and_prefills_the_prompt(redis_client):
    shard = await Shard(redis_client).open("g1", max_running=4, batch_tokens=100)
    many, one, more = [await shard.enqueue() for _ in range(3)]
    assert (await shard.dispatch(many, choices=3)).status == "dispatched"
    (group,) = await shard.scripts.groups()
    assert (group.credit_running, group.credit_tokens) == (1, 64)
    assert (await shard.dispatch(more, choices=2)).status == "no_credit"
    assert (await shard.dispatch(one, tokens=65)).status == "no_credit"
    assert (await shard.dispatch(one, tokens=64)).status == "dispatched"
    await shard.start(many, 1)
    told = ((0, 12), (0, 12), (2, 24), (1, 36))
    for seq, (choice, left) in enumerate(told, start=1):
        deltas = [EmitItem(many, 1, seq, encode(Delta(choice=choice, token_ids=(1,))))]
        await shard.scripts.emit(group="g1", items=deltas)
        (group,) = await shard.scripts.groups()
        # A choice has prefilled once it has said something, and not before.
        assert (group.credit_running, group.credit_tokens) == (0, left)
    assert await shard.finish(many, 1) == "recorded"
    (group,) = await shard.scripts.groups()
    assert (group.credit_running, group.credit_tokens) == (3, 36)


@pytest.mark.parametrize("way", ["release", "cancel", "fail", "expire", "register"])
async def test_slots_of_all_choices_come_back_whatever_ends_the_job(redis_client, way):
    shard = await Shard(redis_client).open("g1", max_running=4)
    job_id = await shard.enqueue()
    assert (await shard.dispatch(job_id, choices=3)).status == "dispatched"
    await shard.start(job_id, 1)
    free = 4
    if way == "release":
        await shard.scripts.release(group="g1", jobs=[(job_id, 1)])
    elif way == "cancel":
        await shard.scripts.cancel(job_id)
        await shard.finish(job_id, 1, state="cancelled")
    elif way == "fail":
        result, end = ending_of(job_id, "failed")
        await shard.scripts.fail(
            group="g1",
            job_id=job_id,
            epoch=1,
            error="{}",
            delay_ms=1,
            max_attempts=3,
            result=result,
            end=end,
        )
    elif way == "expire":
        await shard.client.zadd(KEYS.lease, {job_id: 1})
        assert (await shard.reap()).redelivered == 1
    else:
        await shard.client.delete(KEYS.group("g1"))
        await shard.scripts.heartbeat("g1", group_info("g1", max_running=4), HOUR_MS)
        free = 1
    (group,) = await shard.scripts.groups()
    assert group.credit_running == free


async def test_more_choices_than_slots_go_alone(redis_client):
    shard = await Shard(redis_client).open("g1", max_running=2)
    small, large = [await shard.enqueue() for _ in range(2)]
    assert (await shard.dispatch(small)).status == "dispatched"
    assert (await shard.dispatch(large, choices=5)).status == "no_credit"
    await shard.scripts.release(group="g1", jobs=[(small, 1)])
    assert (await shard.dispatch(large, choices=5)).status == "dispatched"
    (group,) = await shard.scripts.groups()
    assert group.credit_running == -3
    assert (await shard.dispatch(small)).status == "no_credit"


async def test_a_group_that_drains_or_is_gone_gets_nothing(shard):
    job_id = await shard.enqueue()
    info = group_info("g1", state="draining")
    await shard.scripts.heartbeat("g1", info, HOUR_MS)
    assert (await shard.dispatch(job_id)).status == "no_credit"
    await shard.scripts.leave("g1")
    assert (await shard.dispatch(job_id)).status == "no_credit"
    assert await shard.scripts.groups() == []
    assert not await shard.client.exists(KEYS.group("g1"), KEYS.work("g1"))


async def test_a_group_that_comes_back_counts_its_jobs_once(shard):
    job_id, epoch = await shard.run()
    await shard.client.delete(KEYS.group("g1"))
    now = await shard.scripts.heartbeat("g1", group_info("g1"), HOUR_MS)
    (group,) = await shard.scripts.groups()
    assert (group.credit_blocks, group.credit_running) == (996, 99)
    assert group.heartbeat_ms == now
    await shard.finish(job_id, epoch)
    (group,) = await shard.scripts.groups()
    assert (group.credit_blocks, group.credit_running) == (1000, 100)
    assert group.credit_tokens == 4096


async def test_a_heartbeat_moves_credit_with_the_capacity(shard):
    await shard.dispatch(await shard.enqueue())
    info = group_info("g1", total_blocks=500, step_fit_ms=(3.5, 0.25))
    await shard.scripts.heartbeat("g1", info, HOUR_MS)
    (group,) = await shard.scripts.groups()
    assert (group.total_blocks, group.credit_blocks) == (500, 496)
    assert group.step_fit_ms == (3.5, 0.25)


async def test_reject_ends_a_queued_job_with_its_result(shard):
    job_id = await shard.enqueue(idempotency_key="k", deadline_ms=HOUR_MS)
    result, end = ending_of(job_id, "failed")
    call = {"fence": shard.fence, "job_id": job_id, "state": "failed"}
    assert await shard.scripts.reject(**call, result=result, end=end) is True
    assert await shard.scripts.reject(**call, result=result, end=end) is False
    assert await shard.state(job_id) == "failed"
    assert (await shard.result(job_id))["state"] == "failed"
    assert await shard.client.xlen(LANE) == 0
    assert await shard.client.zcard(KEYS.deadline) == 0


async def test_garbage_in_a_stream_becomes_a_dead_letter(shard):
    raw = {b"\xff\x00": b"x" * 10_000, b"id": b"nonsense"}
    entry = (await shard.client.xadd(LANE, raw)).decode()
    for _ in range(2):  # the second time it is gone already
        await shard.scripts.dead_letter(
            entry_key=LANE, entry_id=entry, reason="no such job"
        )
    assert await shard.client.xlen(LANE) == 0
    ((_, letter),) = await shard.client.xrange(KEYS.dead)
    assert letter[b"reason"] == b"no such job"
    assert letter[b"stream"] == LANE.encode()
    assert letter[b"raw:\xff\x00"] == b"x" * 4096


async def test_enqueue_and_room_ring_the_bell(shard):
    async with shard.client.pubsub() as pubsub:
        await pubsub.subscribe(KEYS.bell)
        assert (await pubsub.get_message(timeout=60))["type"] == "subscribe"
        first = await shard.enqueue()
        told = (await pubsub.get_message(timeout=60))["data"]
        assert told == f"enqueue interactive:{first}".encode()
        await shard.dispatch(first)
        await shard.start(first, 1)
        await shard.emit(first, 1, 1, 0)  # nothing waits for this room: silent
        await shard.enqueue()
        told = (await pubsub.get_message(timeout=60))["data"]
        assert told.startswith(b"enqueue interactive:")
        await shard.finish(first, 1)
        assert (await pubsub.get_message(timeout=60))["data"] == b"room"
