"""start, renew, emit, finish, fail and release, on both servers."""

import json

import pytest
from support.leaks import leaked_keys
from support.shard_client import HOUR_MS, KEYS, Shard, delta, ending_of

from tokenmill.shared.errors import RedisUnsuitable
from tokenmill.shared.scripts import EmitItem, FinishItem, StartItem


@pytest.fixture
async def shard(redis_client):
    return await Shard(redis_client).open("g1", "g2")


async def test_start_returns_what_the_engine_needs_and_can_be_repeated(shard):
    job_id = await shard.enqueue(priority=5, deadline_ms=HOUR_MS, tenant="default")
    await shard.dispatch(job_id)
    first = await shard.start(job_id, 1)
    assert await shard.start(job_id, 1) == first
    assert first.status == "started"
    assert first.payload == b'{"text":"hello"}'
    assert first.token_ids == b"\1\0\0\0" * 12
    assert (first.seed, first.priority, first.attempts) == (2**63 - 1, 5, 0)
    assert first.deadline_ms == first.enqueued_ms + HOUR_MS
    assert first.first_ms is None
    assert first.weights is None
    assert first.log == ()
    assert await shard.client.xlen(KEYS.work("g1")) == 0
    assert await shard.log(job_id) == [("1-0", None)]


async def test_a_damaged_record_does_not_stop_its_neighbours_start(shard):
    bad, good = [await shard.enqueue() for _ in range(2)]
    for job_id in (bad, good):
        await shard.dispatch(job_id)
    await shard.client.hset(KEYS.job(bad), "priority", "urgent")
    items = [StartItem(job_id, 1, "") for job_id in (bad, good)]
    replies = await shard.scripts.start(group="g1", lease_ms=HOUR_MS, items=items)
    assert [r.status for r in replies] == ["lost", "started"]
    assert replies[1].payload == b'{"text":"hello"}'


async def test_only_the_owner_with_the_right_epoch_can_do_anything(shard):
    job_id, epoch = await shard.run("g1")
    for group, wrong in (("g2", epoch), ("g1", epoch + 1), ("g1", 0)):
        assert (await shard.start(job_id, wrong, group)).status == "lost"
        assert await shard.emit(job_id, wrong, 1, 0, group) == "lost"
        assert await shard.finish(job_id, wrong, group=group) == "lost"
        assert await shard.fail(job_id, wrong, group=group) == "lost"
        jobs = [(job_id, wrong)]
        assert await shard.scripts.release(group=group, jobs=jobs) == [False]
        renewed = await shard.scripts.renew(group=group, lease_ms=1, jobs=jobs)
        assert renewed == ["lost"]
    assert await shard.state(job_id) == "running"
    assert await shard.log(job_id) == [("1-0", None)]


async def test_deltas_are_logged_and_published_as_the_same_bytes(shard):
    job_id, epoch = await shard.run()
    async with shard.client.pubsub() as pubsub:
        await pubsub.subscribe(KEYS.wake(job_id))
        assert (await pubsub.get_message(timeout=60))["type"] == "subscribe"
        items = [EmitItem(job_id, epoch, i + 1, delta(i)) for i in range(3)]
        assert await shard.scripts.emit(group="g1", items=items) == ["written"] * 3
        heard = [(await pubsub.get_message(timeout=60))["data"] for _ in range(3)]
    logged = await shard.client.xrange(KEYS.log(job_id), "1-1")
    assert heard == [delta(i) for i in range(3)] == [f[b"d"] for _, f in logged]


async def test_a_repeated_emit_is_a_duplicate_and_neighbours_are_written(shard):
    (one, epoch), (two, other) = [await shard.run() for _ in range(2)]
    assert await shard.emit(one, epoch, 1, 0) == "written"
    items = [
        EmitItem(one, epoch, 1, delta(0)),
        EmitItem("no.0.such0job000000000", 1, 1, delta(0)),
        EmitItem(two, other, 1, delta(0)),
        EmitItem(one, epoch, 2, delta(1)),
    ]
    statuses = await shard.scripts.emit(group="g1", items=items)
    assert statuses == ["duplicate", "lost", "written", "written"]
    assert [i for i, _ in await shard.log(one)] == ["1-0", "1-1", "1-2"]


async def test_the_first_delta_gives_prefill_credit_back_and_pins_the_weights(shard):
    job_id, epoch = await shard.run()
    assert (await shard.scripts.groups())[0].credit_tokens == 4084
    await shard.emit(job_id, epoch, 1, 0)
    await shard.emit(job_id, epoch, 2, 1)
    group = (await shard.scripts.groups())[0]
    record = await shard.scripts.job(job_id)
    assert (group.credit_tokens, group.credit_blocks) == (4096, 996)
    assert record["weights"] == "w-1"
    assert int(record["first_ms"]) >= int(record["started_ms"])


async def test_finish_records_once_and_a_repeat_changes_nothing(shard):
    job_id, epoch = await shard.run(idempotency_key="k", deadline_ms=HOUR_MS)
    await shard.emit(job_id, epoch, 1, 0)
    assert await shard.finish(job_id, epoch, 2) == "recorded"
    record, log = await shard.scripts.job(job_id), await shard.log(job_id)
    assert await shard.finish(job_id, epoch, 2, "failed") == "duplicate"
    assert await shard.finish(job_id, epoch, 2, group="g2") == "lost"
    assert await shard.scripts.job(job_id) == record
    assert await shard.log(job_id) == log
    assert record["state"] == "succeeded"
    assert log[-1] == ("1-2", {"end": {"state": "succeeded"}})
    assert (await shard.result(job_id))["state"] == "succeeded"
    assert await shard.client.zcard(KEYS.lease) == 0
    assert await shard.client.zcard(KEYS.deadline) == 0
    ((_, event),) = await shard.client.xrange(KEYS.done)
    assert event[b"id"].decode() == job_id
    assert await leaked_keys(shard.client) == []


async def test_the_end_stands_last_even_when_its_number_was_used(shard):
    job_id, epoch = await shard.run()
    await shard.emit(job_id, epoch, 7, 0)
    assert await shard.finish(job_id, epoch, 7) == "recorded"
    assert (await shard.log(job_id))[-1] == ("2-1", {"end": {"state": "succeeded"}})


async def test_one_bad_end_in_a_batch_leaves_the_others_whole(shard):
    (one, epoch), (two, other) = [await shard.run(), await shard.run()]
    result, end = ending_of(one, "succeeded")
    common = {"seq": 9, "result": result, "end": end}
    items = [
        FinishItem(job_id="no.0.such0job000000000", epoch=1, state="failed", **common),
        FinishItem(job_id=one, epoch=epoch, state="running", **common),  # no ending
        FinishItem(job_id=two, epoch=other, state="succeeded", **common),
    ]
    statuses = await shard.scripts.finish(group="g1", items=items)
    assert statuses == ["lost", "lost", "recorded"]
    assert await shard.state(one) == "running"


async def test_faults_back_off_and_end_when_attempts_are_used_up(shard):
    job_id, epoch = await shard.run(idempotency_key="k")
    await shard.emit(job_id, epoch, 1, 0)
    assert await shard.fail(job_id, epoch, max_attempts=2) == "retrying"
    assert await shard.fail(job_id, epoch, max_attempts=2) == "lost"
    assert await shard.emit(job_id, epoch, 2, 1) == "lost"
    record = await shard.scripts.job(job_id)
    assert (record["state"], record["attempts"]) == ("retrying", "1")
    assert "boom" in record["last_error"]
    assert (await shard.scripts.load())["later:jobs"] == "1"

    await shard.overdue(KEYS.delayed, job_id)
    assert (await shard.reap()).due == 1
    reply = await shard.dispatch(job_id, "g2", entry_key=KEYS.resume)
    started = await shard.start(job_id, reply.epoch, "g2")
    assert [json.loads(d)["token_ids"] for d in started.log] == [[0]]
    assert (started.attempts, started.weights) == (1, "w-1")
    assert started.first_ms is not None
    assert await shard.fail(job_id, reply.epoch, 2, "g2") == "failed"
    assert (await shard.result(job_id))["state"] == "failed"
    ((_, letter),) = await shard.client.xrange(KEYS.dead)
    assert (letter[b"id"].decode(), letter[b"reason"]) == (job_id, b"attempts")
    assert await leaked_keys(shard.client) == []


async def test_release_costs_nothing_and_the_next_run_goes_on(shard):
    job_id, epoch = await shard.run()
    await shard.emit(job_id, epoch, 1, 0)
    jobs = [(job_id, epoch), ("no.0.such0job000000000", 1)]
    assert await shard.scripts.release(group="g1", jobs=jobs) == [True, False]
    record = await shard.scripts.job(job_id)
    assert record["state"] == "queued"
    assert (record.get("attempts"), record.get("lease_losses")) == (None, None)
    ((_, entry),) = await shard.client.xrange(KEYS.resume)
    assert (entry[b"kind"], entry[b"class"]) == (b"release", b"interactive")
    assert await shard.emit(job_id, epoch, 2, 1) == "lost"

    reply = await shard.dispatch(job_id, "g2", entry_key=KEYS.resume)
    started = await shard.start(job_id, reply.epoch, "g2")
    assert started.log == (delta(0),)
    assert await shard.emit(job_id, reply.epoch, 1, 1, "g2") == "written"
    assert [d["token_ids"] for _, d in await shard.log(job_id) if d] == [[0], [1]]


async def test_a_dispatched_job_can_be_released_before_its_start(shard):
    job_id = await shard.enqueue()
    await shard.dispatch(job_id)
    assert await shard.scripts.release(group="g1", jobs=[(job_id, 1)]) == [True]
    assert await shard.client.xlen(KEYS.work("g1")) == 0
    assert (await shard.start(job_id, 1)).status == "lost"


async def test_renew_extends_the_lease(shard):
    job_id, epoch = await shard.run()
    await shard.overdue(KEYS.lease, job_id)
    jobs = [(job_id, epoch)]
    held = await shard.scripts.renew(group="g1", lease_ms=HOUR_MS, jobs=jobs)
    assert held == ["held"]
    assert (await shard.reap()).redelivered == 0


async def test_a_log_of_another_type_loses_that_job_alone(shard):
    bad, good = [await shard.enqueue() for _ in range(2)]
    await shard.client.set(KEYS.log(bad), "garbage")
    for job_id in (bad, good):
        await shard.dispatch(job_id)
    work = await shard.client.xrange(KEYS.work("g1"))
    items = [StartItem(f[b"id"].decode(), 1, i.decode()) for i, f in work]
    started = await shard.scripts.start(group="g1", lease_ms=1000, items=items)
    assert [s.status for s in started] == ["lost", "started"]


@pytest.mark.parametrize("kept", ["both", "finish", "neither"])
async def test_a_last_delta_is_never_overtaken_by_its_end(shard, kept):
    """Not even when the server has lost the one script and kept the other."""
    other, other_epoch = await shard.run()
    job_id, epoch = await shard.run()
    if kept != "both":
        await shard.client.script_flush()
    if kept != "neither":
        await shard.finish(other, other_epoch)
    result, end = ending_of(job_id, "succeeded")
    emitted, recorded = await shard.scripts.emit_and_finish(
        group="g1",
        deltas=[EmitItem(job_id, epoch, 1, delta(0))],
        ends=[
            FinishItem(
                job_id=job_id,
                epoch=epoch,
                seq=2,
                state="succeeded",
                result=result,
                end=end,
            )
        ],
    )
    assert (emitted, recorded) == (["written"], ["recorded"])
    entries = [entry for entry, _ in await shard.log(job_id)]
    assert entries == [f"{epoch}-0", f"{epoch}-1", f"{epoch}-2"]
    assert await shard.state(job_id) == "succeeded"


async def test_a_full_server_holds_an_end_back_with_its_last_delta(shard):
    job_id, epoch = await shard.run()
    result, end = ending_of(job_id, "succeeded")
    item = FinishItem(
        job_id=job_id, epoch=epoch, seq=2, state="succeeded", result=result, end=end
    )

    async def send() -> object:
        return await shard.scripts.emit_and_finish(
            group="g1", deltas=[EmitItem(job_id, epoch, 1, delta(0))], ends=[item]
        )

    await shard.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisUnsuitable, match="out of memory"):
            await send()
    finally:
        await shard.client.config_set("maxmemory", 0)
    assert await shard.state(job_id) == "running"
    assert await send() == (["written"], ["recorded"])
    entries = [entry for entry, _ in await shard.log(job_id)]
    assert entries == [f"{epoch}-0", f"{epoch}-1", f"{epoch}-2"]


async def test_a_full_server_lets_jobs_be_cancelled_and_has_a_leader(shard):
    running, epoch = await shard.run()
    queued = await shard.enqueue()
    await shard.client.config_set("maxmemory", 1)
    try:
        assert await shard.scripts.cancel(running) == "cancelling"
        assert await shard.scripts.cancel(queued) == "cancelled"
        await shard.scripts.release_scheduler("scheduler")
        assert await shard.scripts.acquire_scheduler("another", 1000)
    finally:
        await shard.client.config_set("maxmemory", 0)
    assert (await shard.scripts.job(running))["cancel"] == "1"
    assert await shard.emit(running, epoch, 1, 0) == "cancelled"
