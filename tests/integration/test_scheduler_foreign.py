"""Whatever foreign clients write: a job ends alone, and the shard goes on."""

import asyncio
import json

import msgspec
import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from support.scheduled_pool import CARD, KEYS, Pool, new_job, scheduling
from support.shard_client import Shard
from support.waiting import wait_until

from tokenmill.scheduler import tokenizing
from tokenmill.scheduler.entries import lane_stream
from tokenmill.scheduler.tokenizing import Prepared, RawJob, prepare
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.keys import SHARDS, JobId, Keys
from tokenmill.shared.messages import JobRequest, encode
from tokenmill.shared.scripts import NewJob
from tokenmill.shared.tokens import BYTES, load_tokenizer

DEEP = b"[" * 1000 + b"]" * 1000


@pytest.fixture
async def pool(redis_client: "redis.asyncio.Redis"):
    pool = Pool(redis_client)
    async with scheduling(redis_client):
        yield pool


@pytest.mark.parametrize(
    "payload",
    [
        b'{"text":"a","x":' + DEEP + b"}",
        b'{"text":' + DEEP + b"}",
        b'{"text":"a","sampling":{"max_tokens":' + DEEP + b"}}",
        DEEP,
    ],
)
async def test_a_deeply_nested_payload_ends_alone(pool: Pool, payload: bytes):
    await pool.group(max_running=20)
    ids = await pool.enqueue(
        new_job("before"), new_job(None, payload=payload), new_job("after")
    )
    started = await pool.work(2)
    assert {s.job_id for s in started} == {ids[0], ids[2]}
    result = await pool.result(ids[1])
    assert result.error is not None
    assert "nested too deeply" in result.error.message
    assert result.error.code in {"protocol_error", "invalid_request"}


class Faulty:
    """A tokenizer that meets a fault of ours in some texts."""

    fingerprint, vocab_size, has_chat_template = BYTES, 257, True

    def __init__(self) -> None:
        self._inner = load_tokenizer(BYTES)

    def encode_request(self, request, max_context=None):
        return self.encode_requests([request], max_context)[0]

    def encode_requests(self, requests, max_context=None):
        if any("boom" in (request.text or "") for request in requests):
            raise RuntimeError("the tokenizer broke")
        return self._inner.encode_requests(requests, max_context)


async def test_a_fault_of_ours_ends_the_job_that_met_it(
    redis_client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tokenizing, "load_tokenizer", lambda bundle: Faulty())
    pool = Pool(redis_client)
    with capture_logs() as logs:
        async with scheduling(redis_client):
            await pool.group(max_running=20)
            ids = await pool.enqueue(
                *(new_job("boom" if i == 3 else f"job {i}") for i in range(8))
            )
            assert len(await pool.work(7)) == 7
            result = await pool.result(ids[3])
    assert result.error is not None
    assert result.error.code == "internal_error"
    assert "RuntimeError" in result.error.message
    [line] = [line for line in logs if line["event"] == "internal_error"]
    assert isinstance(line["exc_info"], RuntimeError)


def _outcomes(payloads: list[bytes]) -> list[object]:
    raw = [RawJob(payload, None) for payload in payloads]
    return list(prepare(raw, load_tokenizer(BYTES), CARD, 4096))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
shaped = st.fixed_dictionaries(
    {},
    optional={
        "v": anything,
        "text": anything | st.text(),
        "messages": anything,
        "sampling": st.dictionaries(
            st.sampled_from([*JobRequest().sampling.__struct_fields__, "odd"]), anything
        ),
        "control_tokens": anything,
        "other": anything,
    },
)
a_payload = st.binary(max_size=64) | (anything | shaped).map(
    lambda value: json.dumps(value).encode()
)


@settings(deadline=None, max_examples=300)
@given(st.lists(a_payload, max_size=4))
def test_any_payload_gives_one_outcome_and_leaves_others_alone(payloads):
    good = encode(JobRequest(text="hello"))
    outcomes = _outcomes([*payloads, good])
    assert len(outcomes) == len(payloads) + 1
    assert all(isinstance(o, Prepared | TokenmillError) for o in outcomes)
    assert isinstance(outcomes[-1], Prepared)
    # Nothing that a client can send is a fault of ours.
    assert all(type(o) is not TokenmillError for o in outcomes)


@settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)
@given(payloads=st.lists(a_payload, min_size=1, max_size=6))
def test_no_payload_stops_the_shard(newest_redis, payloads):
    async def drive() -> None:
        client = redis.asyncio.Redis.from_url(newest_redis.url)
        await client.flushall()
        pool = Pool(client)
        async with scheduling(client):
            await pool.group(max_running=50)
            strange = await pool.enqueue(
                *(new_job(None, payload=payload) for payload in payloads)
            )
            [last] = await pool.enqueue(new_job("good"))

            async def settled() -> bool:
                states = [await pool.state(job_id) for job_id in strange]
                good = await pool.state(last) == "dispatched"
                return good and "queued" not in states

            await wait_until(settled, what="all jobs ended or sent")
        await client.aclose()

    asyncio.run(drive())


def raw_job(**changes) -> NewJob:
    return msgspec.structs.replace(new_job("hello"), **changes)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("tenant", {"tenant": "a/b"}),
        ("tenant", {"tenant": ""}),
        ("tenant", {"tenant": "t" * 65}),
        ("id", {"id": JobId("tiny", 0, "short")}),
        ("id", {"id": JobId("tiny", 0, "u" * 41)}),
        ("id", {"id": JobId("tiny", 1, "u" * 20)}),
        ("id", {"id": JobId("other", 0, "u" * 20)}),
        ("id", {"id": JobId("m" * 97, 0, "u" * 20)}),
        ("idempotency_key", {"idempotency_key": "a b"}),
        ("idempotency_key", {"idempotency_key": "k" * 201}),
        ("idempotency_key", {"idempotency_key": "ü"}),
        ("bucket", {"bucket": "a:b"}),
        ("bucket", {"bucket": ""}),
        ("bucket", {"bucket": "1" * 11}),
        ("seed", {"seed": 2**63}),
        ("priority", {"priority": 101}),
    ],
)
async def test_enqueue_refuses_what_the_scheduler_would(
    redis_client: "redis.asyncio.Redis", argument: str, changes: dict[str, object]
):
    shard = Shard(redis_client)
    [reply] = await shard.scripts.enqueue([raw_job(**changes)])
    assert reply.status == "invalid"
    assert reply.detail.startswith(f"{argument}: expected")
    assert await redis_client.keys("tm:{*:job:*") == []


async def test_every_bucket_that_enqueue_takes_is_served(pool: Pool):
    await pool.group()
    [job_id] = await pool.enqueue(new_job("hello", bucket="77"))
    [started] = await pool.work(1)
    assert started.job_id == job_id


async def test_a_job_whose_entry_is_buried_ends_as_failed(
    redis_client: "redis.asyncio.Redis",
):
    pool = Pool(redis_client)
    bad, fine = await pool.enqueue(new_job("bad"), new_job("fine"))
    record = await pool.scripts.job(bad)
    assert record is not None
    lane = record["entry_key"]
    entry = await redis_client.xadd(lane, {"id": bad, "tenant": "t", "priority": "no"})
    await redis_client.xdel(lane, record["entry"])
    await redis_client.hset(KEYS.job(bad), "entry", entry)  # type: ignore[misc]
    # A stranger's entry that names a sound job does it no harm.
    await redis_client.xadd(lane, {"id": fine, "tenant": "a/b", "priority": "0"})
    await pool.card()
    async with scheduling(redis_client):
        result = await pool.result(bad)
        assert result.error is not None
        assert (result.state, result.error.code) == ("failed", "protocol_error")
        assert "priority" in result.error.message
        assert len(await pool.dead(2)) == 2
        await pool.group()
        [started] = await pool.work(1)
    assert started.job_id == fine
    assert "jobs" not in await pool.scripts.load()


async def test_foreign_members_of_the_shards_are_dropped_once(
    redis_client: "redis.asyncio.Redis",
):
    await redis_client.sadd(SHARDS, "a:b:0", "x", "m:007", b"\xff:0", "m:\u0661")
    with capture_logs() as logs:
        async with scheduling(redis_client):
            pool = Pool(redis_client)
            await pool.group()
            await pool.enqueue(new_job("hello"))
            await pool.work(1)
    assert await redis_client.smembers(SHARDS) == {b"tiny:0"}
    dropped = [line["member"] for line in logs if line["event"] == "shard_dropped"]
    assert len(dropped) == len(set(dropped)) == 5


async def test_a_group_that_a_stranger_wrote_stops_nobody(pool: Pool):
    await pool.client.zadd(KEYS.groups, {"w-odd": 9e15, "w-text": 9e15})
    odd = {"group": "w-odd", "state": "ready", "total_blocks": "many"}
    await pool.client.hset(KEYS.group("w-odd"), mapping=odd)  # type: ignore[misc]
    await pool.client.set(KEYS.group("w-text"), "x")
    await pool.group()
    [job_id] = await pool.enqueue(new_job("hello"))
    [started] = await pool.work(1)
    assert started.job_id == job_id


def test_lanes_have_one_name():
    assert lane_stream(Keys("tiny", 0), b"bulk:128:7") is not None
    for name in ("bulk:128:007", "bulk:128:-1", "bulk:128:\u0663", "bulk:1"):
        assert lane_stream(Keys("tiny", 0), name.encode()) is None
