"""enqueue: idempotency, limits, delays, validation; every case on both servers."""

import msgspec
import pytest
from support.shard_client import HOUR_MS, KEYS, Shard, new_job
from support.waiting import wait_until

from tokenmill.shared.errors import RedisUnsuitable
from tokenmill.shared.keys import SHARDS, lane_of


@pytest.fixture
async def shard(redis_client):
    return await Shard(redis_client).open("g1")


async def test_a_job_is_recorded_with_its_payload_entry_and_counters(shard):
    job_id = await shard.enqueue(tenant="acme", priority=-3, deadline_ms=HOUR_MS)
    record = await shard.scripts.job(job_id)
    lane = KEYS.queue("interactive", "128", lane_of("acme"))
    entries = await shard.client.xrange(lane)
    assert record["state"] == "queued"
    assert (record["entry_key"], record["entry"].encode()) == (lane, entries[0][0])
    assert entries[0][1] == {
        b"id": job_id.encode(),
        b"tokens": b"10",
        b"max_tokens": b"16",
        b"priority": b"-3",
        b"deadline": record["deadline"].encode(),
        b"tenant": b"acme",
        b"bytes": b"16",
    }
    assert await shard.client.get(KEYS.input(job_id)) == b'{"text":"hello"}'
    assert await shard.client.zrange(KEYS.lanes, 0, -1) == [
        lane.split(":q:")[1].encode()
    ]
    assert await shard.client.zrange(KEYS.recent, 0, -1) == [job_id.encode()]
    assert await shard.client.smembers(SHARDS) == {KEYS.shard.encode()}
    assert int(record["deadline"]) == int(record["enqueued_ms"]) + HOUR_MS
    assert (await shard.scripts.load())["tenant:acme:jobs"] == "1"


async def test_a_repeated_id_is_a_duplicate_and_another_payload_a_conflict(shard):
    job = new_job()
    other = msgspec.structs.replace(job, payload_hash="b" * 32)
    replies = await shard.scripts.enqueue([job, job, other])
    assert [r.status for r in replies] == ["queued", "duplicate", "conflict"]
    assert (await shard.scripts.load())["jobs"] == "1"


async def test_an_idempotency_key_leads_to_the_first_job(shard):
    first = await shard.enqueue(idempotency_key="k")
    same, other, stranger = await shard.scripts.enqueue(
        [
            new_job(idempotency_key="k"),
            new_job(idempotency_key="k", payload_hash="b" * 32),
            new_job(idempotency_key="k", tenant="acme"),
        ]
    )
    assert (same.status, same.job_id) == ("duplicate", first)
    assert (other.status, other.job_id) == ("conflict", first)
    assert stranger.status == "queued"
    assert await shard.client.ttl(KEYS.idempotency("default", "k")) == -1
    await shard.scripts.cancel(first)
    assert 0 < await shard.client.pttl(KEYS.idempotency("default", "k")) <= HOUR_MS


async def test_a_delayed_job_waits_in_no_stream_until_it_is_due(shard):
    job_id = await shard.enqueue(delay_ms=500)
    assert await shard.state(job_id) == "delayed"
    assert await shard.client.zcard(KEYS.lanes) == 0
    assert (await shard.scripts.load())["later:jobs"] == "1"

    async def due():
        return (await shard.reap()).due

    assert await wait_until(due) == 1
    assert await shard.state(job_id) == "queued"
    ((_, fields),) = await shard.client.xrange(KEYS.resume)
    assert fields[b"kind"] == b"due"
    reply = await shard.dispatch(job_id, entry_key=KEYS.resume)
    assert reply.status == "dispatched"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"job_class": "urgent"}, "class"),
        ({"tenant": ""}, "tenant"),
        ({"payload_hash": "two words"}, "hash"),
        ({"payload_hash": "x" * 65}, "hash"),
        ({"priority": 101}, "priority"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": "many"}, "tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": -5}, "seed"),
        ({"deadline_ms": "soon"}, "deadline_ms"),
        ({"delay_ms": 1.5}, "delay_ms"),
        ({"delay_ms": 50, "deadline_ms": 50}, "deadline_ms: comes before"),
        ({"delay_ms": 1, "not_before_ms": 1}, "not_before_ms"),
        ({"not_before_ms": "now"}, "not_before_ms"),
        ({"not_before_ms": 2**42, "deadline_ms": 1000}, "deadline_ms: comes before"),
        ({"refuse_late": "yes"}, "refuse_late"),
        ({"adapter": "a:b"}, "adapter"),
        ({"adapter": "a" * 65}, "adapter"),
        ({"v": 0}, "v"),
        ({"payload": b"x" * (4 * 1024 * 1024 + 1)}, "payload: has 4194305 bytes"),
        ({"keep_ms": 0}, "keep_ms"),
        ({"keep_ms": "nan"}, "keep_ms"),
    ],
)
async def test_a_bad_argument_is_named_and_neighbours_are_recorded(
    shard, changes, word
):
    bad = new_job(**changes)
    replies = await shard.scripts.enqueue([new_job(), bad, new_job()])
    assert [r.status for r in replies] == ["queued", "invalid", "queued"]
    assert replies[1].detail.startswith(word)
    assert not await shard.client.exists(KEYS.job(str(bad.id)), KEYS.input(str(bad.id)))
    assert (await shard.scripts.load())["jobs"] == "2"


async def test_a_strangers_key_in_place_of_a_lane_stops_that_job_alone(shard):
    await shard.client.set(KEYS.queue("bulk", "128", lane_of("default")), "garbage")
    taken = new_job()
    await shard.client.set(KEYS.job(str(taken.id)), "garbage")
    replies = await shard.scripts.enqueue([new_job(job_class="bulk"), taken, new_job()])
    assert [r.status for r in replies] == ["invalid", "invalid", "queued"]
    assert (await shard.scripts.load())["jobs"] == "1"


async def test_large_lists_are_sent_in_chunks(shard):
    jobs = [new_job() for _ in range(600)]
    replies = await shard.scripts.enqueue(jobs)
    assert [r.job_id for r in replies] == [str(job.id) for job in jobs]
    assert {r.status for r in replies} == {"queued"}
    assert (await shard.scripts.load())["jobs"] == "600"


async def test_without_memory_the_whole_call_is_refused_and_ends_still_work(shard):
    job_id, epoch = await shard.run()
    await shard.client.config_set("maxmemory", 1)
    job = new_job()
    try:
        with pytest.raises(RedisUnsuitable, match="out of memory"):
            await shard.enqueue()
        with pytest.raises(RedisUnsuitable, match="out of memory"):
            await shard.scripts.enqueue([job])
        with pytest.raises(RedisUnsuitable, match="out of memory"):
            await shard.emit(job_id, epoch, 1, 0)
        assert await shard.finish(job_id, epoch) == "recorded"
    finally:
        await shard.client.config_set("maxmemory", 0)
    assert await shard.scripts.job(str(job.id)) is None
    assert "jobs" not in await shard.scripts.load()
    assert await shard.state(job_id) == "succeeded"
