"""The scheduler against a real Redis, with a group that the test plays itself."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import redis.asyncio
from support.scheduled_pool import (
    CONFIG,
    KEYS,
    Pool,
    new_job,
    scheduling,
)
from support.servers import RedisServer
from support.waiting import Delay, wait_until

from tokenmill.scheduler.loop import pool_card
from tokenmill.shared.config import Config, SchedulerConfig
from tokenmill.shared.keys import (
    MODELS,
    POOL,
    SCRIPTS,
    JobId,
    new_unique,
)
from tokenmill.shared.messages import (
    Delta,
    JobRequest,
    JobResult,
    Message,
    ModelCard,
    PoolCard,
    Sampling,
    encode,
)
from tokenmill.shared.scripts import (
    Scripts,
)
from tokenmill.shared.tokens import ids_from_bytes


@pytest.fixture
async def pool(redis_client: "redis.asyncio.Redis") -> AsyncIterator[Pool]:
    pool = Pool(redis_client)
    async with scheduling(redis_client):
        yield pool


async def test_a_job_goes_to_the_group_with_its_exact_tokens(pool: Pool):
    await pool.group()
    [job_id] = await pool.enqueue(new_job("héllo"))
    [started] = await pool.work(1)
    assert (started.status, started.job_id) == ("started", job_id)
    assert ids_from_bytes(started.token_ids) == list("héllo".encode())
    record = await pool.scripts.job(job_id)
    assert record is not None
    assert record["tokens"] == "6"
    assert record["cost_blocks"] == "2"
    assert await pool.client.xlen(KEYS.queue("interactive", "128", 0)) == 0


async def test_jobs_that_came_before_the_worker_and_the_scheduler_are_found(
    redis_client: "redis.asyncio.Redis",
):
    pool = Pool(redis_client)
    ids = await pool.enqueue(*(new_job(f"job {i}") for i in range(20)))
    async with scheduling(redis_client):
        await pool.group(max_running=20)
        started = await pool.work(20)
    assert sorted(s.job_id for s in started) == sorted(ids)


async def test_the_pool_publishes_its_card_and_scripts(pool: Pool):
    async def published() -> bool:
        return bool(await pool.client.exists(POOL, SCRIPTS) == 2)

    await wait_until(published, what="card and scripts")
    raw = await pool.client.get(POOL)
    assert msgspec.json.decode(raw, type=PoolCard) == pool_card(CONFIG)
    assert b"enqueue" in await pool.client.hkeys(SCRIPTS)


async def test_more_jobs_than_slots_follow_as_room_is_made(pool: Pool):
    await pool.group(max_running=2)
    await pool.enqueue(*(new_job(f"job {i}") for i in range(5)))
    seen = []
    while len(seen) < 5:
        started = await pool.work(1)
        info = (await pool.scripts.groups())[0]
        assert info.credit_running >= 0
        assert info.credit_blocks >= 0
        seen += started
        await pool.finish(started)
    assert len({s.job_id for s in seen}) == 5
    info = (await pool.scripts.groups())[0]
    assert (info.credit_running, info.credit_blocks) == (2, 100)


async def test_interactive_overtakes_bulk(redis_client: "redis.asyncio.Redis"):
    pool = Pool(redis_client)
    await pool.enqueue(*(new_job(f"b{i}", job_class="bulk") for i in range(30)))
    [urgent] = await pool.enqueue(new_job("now"))
    async with scheduling(redis_client):
        await pool.group(max_running=1)
        order = []
        for _ in range(3):
            started = await pool.work(1)
            order += [s.job_id for s in started]
            await pool.finish(started)
    assert urgent in order[:2]


@pytest.mark.parametrize(
    ("job", "code", "words"),
    [
        (new_job("x" * 300), "prompt_too_long", ("300", "200")),
        (new_job("x" * 190, max_tokens=50), "prompt_too_long", ("190", "50", "200")),
        (new_job("a <eos> b"), "control_tokens_in_text", ("<eos>", "as_text")),
        (
            new_job(payload=b'{"text": "x", "sampling": {"temperature": -1}}'),
            "invalid_request",
            ("-1",),
        ),
        (
            new_job(payload=b'{"text": "x", "sampling": {"heat": 1}}'),
            "invalid_request",
            ("know",),
        ),
        (new_job(payload=b'{"text": ""}'), "invalid_request", ("empty",)),
    ],
    ids=["context", "with_output", "control", "range", "unknown", "empty"],
)
async def test_bad_input_ends_that_job_alone(pool: Pool, job, code, words):
    await pool.group()
    job = msgspec.structs.replace(job, id=JobId("tiny", 0, new_unique()))
    bad, good = await pool.enqueue(job, new_job("fine"))
    [started] = await pool.work(1)
    assert started.job_id == good
    result = await pool.result(bad)
    assert result.error is not None
    assert result.error.code == code
    for word in words:
        assert word in result.error.message
    [(_, fields)] = await pool.client.xrange(KEYS.done)
    assert fields[b"id"].decode() == bad


async def test_a_job_larger_than_every_pool_of_blocks_is_refused_with_numbers(
    pool: Pool,
):
    await pool.group(total_blocks=10)
    large, good = await pool.enqueue(new_job("x" * 90), new_job("fine"))
    [started] = await pool.work(1)
    assert started.job_id == good
    result = await pool.result(large)
    assert result.error is not None
    assert result.error.code == "prompt_too_long"
    assert "80" in result.error.message
    assert "90" in result.error.message


async def test_garbage_is_buried_and_stops_nothing(pool: Pool):
    await pool.group()
    lane = KEYS.queue("interactive", "128", 0)
    job_id = str(JobId("tiny", 0, new_unique()))
    valid = {"id": job_id, "tenant": "t", "priority": "0", "deadline": ""}
    for fields in (
        {"x": "y"},
        {**valid, "id": b"\xff\xfe"},
        {**valid, "id": "other.0.aaaaaaaaaaaaaaaa"},
        {**valid, "priority": "many"},
        {**valid, "tenant": "a b"},
        {**valid, "bytes": "-3"},
        valid,
    ):
        await pool.client.xadd(lane, fields)
    await pool.client.xadd(KEYS.resume, {**valid, "class": "urgent"})
    await pool.client.zadd(KEYS.lanes, {"interactive:128:0": 1, "nonsense": 2})
    undecodable, newer, good = await pool.enqueue(
        new_job(payload=b"\xff not json"),
        new_job(payload=b'{"v": 99, "text": "x"}'),
        new_job("fine"),
    )
    [started] = await pool.work(1)
    assert started.job_id == good
    for job in (undecodable, newer):
        error = (await pool.result(job)).error
        assert error is not None
        assert error.code == "protocol_error"
    reasons = await pool.dead(10)
    for words in ("missing", "UTF-8", "another shard", "many", "no input", "version"):
        assert any(words in reason for reason in reasons), (words, reasons)
    assert await pool.client.xlen(lane) == 0


async def test_a_lane_that_is_no_stream_stops_nothing(pool: Pool):
    await pool.group()
    await pool.client.set(KEYS.queue("interactive", "512", 3), "not a stream")
    await pool.client.zadd(KEYS.lanes, {"interactive:512:3": 1})
    [good] = await pool.enqueue(new_job("fine"))
    [started] = await pool.work(1)
    assert started.job_id == good


async def test_cancelled_and_expired_jobs_leave(pool: Pool):
    await pool.card()
    cancelled, late = await pool.enqueue(new_job("a"), new_job("b", deadline_ms=150))
    assert await pool.scripts.cancel(cancelled) == "cancelled"
    assert (await pool.result(late, "expired")).state == "expired"
    await pool.group()
    [good] = await pool.enqueue(new_job("c"))
    started = await pool.work(1)
    assert [s.job_id for s in started] == [good]


async def test_a_delayed_job_comes_in_its_time(pool: Pool):
    await pool.group()
    [job_id] = await pool.enqueue(new_job("later", delay_ms=1000))
    assert await pool.state(job_id) == "delayed"
    [started] = await pool.work(1)
    assert started.job_id == job_id
    assert started.started_ms - started.enqueued_ms >= 1000


async def test_a_lost_lease_is_redelivered_without_tokenizing_again(pool: Pool):
    await pool.group()
    [job_id] = await pool.enqueue(new_job("again"))
    [first] = await pool.work(1)
    # Its ids decide from now on, whatever the tokenizer would say.
    await pool.client.set(KEYS.ids(job_id), b"\x07\0\0\0")
    await pool.scripts.forfeit("w-1")
    await pool.group("w-2")
    pool.cursor = b"0"
    [second] = await pool.work(1, "w-2")
    assert (second.job_id, second.status) == (job_id, "started")
    assert second.epoch > first.epoch
    assert ids_from_bytes(second.token_ids) == [7]


async def test_a_draining_group_gets_nothing(pool: Pool):
    await pool.group("w-old")
    info = (await pool.scripts.groups())[0]
    await pool.scripts.heartbeat(
        "w-old", msgspec.structs.replace(info, state="draining"), ttl_ms=60_000
    )
    await pool.group("w-1")
    await pool.enqueue(*(new_job(f"job {i}") for i in range(6)))
    assert len(await pool.work(6)) == 6
    assert await pool.client.xlen(KEYS.work("w-old")) == 0


async def test_messages_are_rendered(pool: Pool):
    await pool.group()
    request = JobRequest(messages=(Message("user", "hi"),), sampling=Sampling())
    payload = encode(msgspec.structs.replace(request, sampling=Sampling(max_tokens=3)))
    await pool.enqueue(new_job(payload=payload))
    [started] = await pool.work(1)
    assert bytes(ids_from_bytes(started.token_ids)) == b"user: hi\nassistant: "


async def test_a_standby_takes_over_within_a_lease_and_a_second(
    redis_client: "redis.asyncio.Redis", redis_server: RedisServer
):
    pool = Pool(redis_client)
    await pool.group()
    other = redis.asyncio.Redis.from_url(redis_server.url)
    async with scheduling(other) as first:
        await pool.enqueue(new_job("one"))
        await pool.finish(await pool.work(1))
        async with scheduling(redis_client, standby=True):
            await pool.enqueue(new_job("two"))
            await pool.finish(await pool.work(1))
            # Gone without a word: its connections break before it could release.
            await other.connection_pool.disconnect()
            first.cancel()
            loop = asyncio.get_running_loop()
            began = loop.time()
            async with Delay() as delay:
                await pool.enqueue(new_job("three"))
                [third] = await pool.work(1)
            lease_s = CONFIG.scheduler.leader_lease_ms / 1000
            assert loop.time() - began < lease_s + 1.0 + delay.allowance_s
            assert third.status == "started"
    await other.aclose()


async def test_a_stopped_scheduler_gives_its_lease_back(
    redis_client: "redis.asyncio.Redis",
):
    pool = Pool(redis_client)
    await pool.group()
    config = Config(scheduler=SchedulerConfig(leader_lease_ms=60_000))
    for text in ("first", "second"):
        async with scheduling(redis_client, config):
            [job_id] = await pool.enqueue(new_job(text))
            [started] = await pool.work(1)
            assert (started.status, started.job_id) == ("started", job_id)
            await pool.finish([started])


async def test_it_goes_on_after_a_flush(pool: Pool):
    await pool.group()
    await pool.enqueue(new_job("before"))
    await pool.work(1)
    await pool.client.flushall()
    pool.cursor = b"0"
    pool.scripts = Scripts(pool.client, KEYS)
    await pool.group()
    await pool.enqueue(new_job("after"))
    [started] = await pool.work(1)
    assert started.status == "started"


async def test_bytes_per_token_are_learned(pool: Pool):
    await pool.group()
    await pool.enqueue(*(new_job("x" * 120) for _ in range(20)))

    async def learned() -> bool:
        raw = await pool.client.hget(MODELS, "tiny")
        return msgspec.json.decode(raw, type=ModelCard).bytes_per_token == 1.0

    await wait_until(learned, what="the learned ratio")


def test_a_terminal_delta_can_be_read():
    from tokenmill.scheduler.refusing import failure
    from tokenmill.shared.errors import InvalidRequest

    result, end = failure("tiny.0." + "a" * 16, InvalidRequest("top_p", "is wrong"))
    error = msgspec.json.decode(result, type=JobResult).error
    assert error is not None
    assert (error.code, error.field) == ("invalid_request", "top_p")
    finale = msgspec.json.decode(end, type=Delta).end
    assert finale is not None
    assert finale.error == error
