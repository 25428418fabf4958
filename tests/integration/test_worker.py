"""A worker against a real Redis: what it takes, publishes, records and hands back."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import redis.asyncio
import structlog
from support.waiting import PATIENCE_S, wait_until

from tokenmill.shared.config import Config, WorkerConfig
from tokenmill.shared.keys import JobId, Keys, new_unique
from tokenmill.shared.messages import (
    CANCELLED,
    EXPIRED,
    Delta,
    End,
    FinishReason,
    JobRequest,
    JobResult,
    ModelCard,
    Sampling,
    encode,
)
from tokenmill.shared.scripts import DispatchItem, NewJob, Scripts
from tokenmill.shared.tokens import ids_to_bytes
from tokenmill.workers.bridge import EXIT_STUCK, Worker
from tokenmill.workers.echo import EchoEngine
from tokenmill.workers.engine.request import EngineRequest, StepOutput
from tokenmill.workers.herald import Herald
from tokenmill.workers.registration import WorkerSpec

MODEL = "echo"
KEYS = Keys(MODEL, 0)


class Pool:
    """One worker, and a test in the place of producer and scheduler."""

    def __init__(self, client: redis.asyncio.Redis, worker: Worker, group: str) -> None:
        self.client = client
        self.worker = worker
        self.group = group
        self.scripts = Scripts(client, KEYS)
        self.fence = 0
        self.task: asyncio.Task[int] | None = None

    async def start(self) -> None:
        await self.worker.announce()
        self.task = asyncio.create_task(self.worker.run())
        fence = await self.scripts.acquire_scheduler("test", 60_000)
        assert fence is not None
        self.fence = fence

    async def enqueue(
        self,
        text: str,
        *,
        deadline_ms: int | None = None,
        payload: bytes | None = None,
        **sampling: object,
    ) -> str:
        request = JobRequest(text=text, sampling=Sampling(**sampling))
        job_id = JobId(MODEL, 0, new_unique())
        job = NewJob(
            id=job_id,
            payload=encode(request) if payload is None else payload,
            payload_hash="h",
            job_class="interactive",
            tenant="default",
            bucket="128",
            tokens=len(text),
            max_tokens=request.sampling.max_tokens,
            seed=1,
            deadline_ms=deadline_ms,
            keep_ms=60_000,
        )
        (reply,) = await self.scripts.enqueue([job])
        assert reply.status == "queued"
        return str(job_id)

    async def dispatch(self, *jobs: tuple[str, str], group: str | None = None) -> None:
        items = [
            DispatchItem(
                job_id=job_id,
                tokens=len(text),
                token_ids=ids_to_bytes(list(text.encode())),
                cost_blocks=1,
                bucket="128",
            )
            for job_id, text in jobs
        ]
        replies = await self.scripts.dispatch(
            fence=self.fence,
            group=group or self.group,
            batch="b",
            lease_ms=10_000,
            items=items,
        )
        assert [reply.status for reply in replies] == ["dispatched"] * len(jobs)

    async def submit(self, text: str, **options: object) -> str:
        job_id = await self.enqueue(text, **options)
        await self.dispatch((job_id, text))
        return job_id

    async def result(self, job_id: str, timeout_s: float = PATIENCE_S) -> JobResult:
        raw = await wait_until(
            lambda: self.client.get(KEYS.output(job_id)),
            timeout_s=timeout_s,
            what=f"the result of {job_id}",
        )
        return msgspec.json.decode(raw, type=JobResult)

    async def state(self, job_id: str) -> str:
        return (await self.client.hget(KEYS.job(job_id), "state")).decode()

    async def log(self, job_id: str) -> list[Delta]:
        entries = await self.client.xrange(KEYS.log(job_id))
        return [
            msgspec.json.decode(fields[b"d"], type=Delta)
            for _, fields in entries
            if b"d" in fields
        ]


Starter = Callable[..., "asyncio.Future[Pool]"]


@pytest.fixture
async def pools(redis_client: redis.asyncio.Redis) -> AsyncIterator[object]:
    """Starts pools; all are drained at the end."""
    made: list[Pool] = []

    async def start(engine: object | None = None, **worker: object) -> Pool:
        settings = {"lease_ms": 900, "drain_s": 2.0, "emit_ms": 5, **worker}
        config = Config(worker=WorkerConfig(**settings))
        group = f"w-{secrets.token_hex(8)}"
        spec = WorkerSpec(
            group=group,
            card=ModelCard(
                model=MODEL,
                max_context=4096,
                vocab_size=257,
                tokenizer="bytes",
                has_chat_template=True,
                weights_version="echo",
            ),
            bundle=None,
            block_size=8,
            batch_tokens=100_000,
        )
        worker_ = Worker(
            client=redis_client,
            keys=KEYS,
            engine=engine or EchoEngine(),
            spec=spec,
            config=config,
        )
        pool = Pool(redis_client, worker_, group)
        await pool.start()
        made.append(pool)
        return pool

    yield start
    for pool in made:
        pool.worker.drain()
        await asyncio.wait_for(pool.task, 60)


def slow(step_ms: float = 10) -> EchoEngine:
    return EchoEngine(max_running=64, step_s=step_ms / 1000)


async def test_a_job_is_answered_recorded_and_streamed(pools) -> None:
    pool = await pools()
    job_id = await pool.submit("hello")
    result = await pool.result(job_id)
    assert result.state == "succeeded"
    assert result.text == "hello"
    assert result.choices[0].finish_reason is FinishReason.STOP
    assert result.usage.prompt_tokens == result.usage.completion_tokens == 5
    assert result.timings.queued_ms >= 0
    assert result.timings.ttft_ms >= result.timings.queued_ms
    assert result.timings.total_ms >= result.timings.ttft_ms
    *deltas, last = await pool.log(job_id)
    assert "".join(delta.text for delta in deltas) == "hello"
    assert last.end.state == "succeeded"


async def test_many_jobs_at_once_all_end_right(pools) -> None:
    pool = await pools()
    texts = [f"text number {i}" for i in range(200)]
    ids = [await pool.enqueue(text) for text in texts]
    await pool.dispatch(*zip(ids, texts, strict=True))
    results = [await pool.result(job_id) for job_id in ids]
    assert [result.text for result in results] == texts
    assert await pool.client.xlen(KEYS.work(pool.group)) == 0
    assert await pool.client.zcard(KEYS.lease) == 0


async def test_offsets_are_contiguous_per_choice(pools) -> None:
    pool = await pools(slow(2))
    job_id = await pool.submit("abcdefghijklmnop", n=3)
    await pool.result(job_id)
    seen = {0: 0, 1: 0, 2: 0}
    for delta in await pool.log(job_id):
        if delta.end is None:
            assert delta.offset == seen[delta.choice]
            seen[delta.choice] += len(delta.token_ids)
    assert seen == {0: 16, 1: 16, 2: 16}


async def test_an_invalid_payload_fails_alone(pools) -> None:
    pool = await pools(slow(2))
    bad = await pool.enqueue("x", payload=b'{"text": 5}')
    worse = await pool.enqueue("x", payload=b"\xff\x00 not json")
    good = await pool.enqueue("good")
    await pool.dispatch((bad, "x"), (worse, "x"), (good, "good"))
    assert (await pool.result(good)).text == "good"
    for job_id in (bad, worse):
        result = await pool.result(job_id)
        assert result.state == "failed"
        assert result.error.code == "invalid_request"
    assert (await pool.result(bad)).error.field == "text"


async def ended(pool: Pool, job_id: str) -> End | None:
    return next((d.end for d in await pool.log(job_id) if d.end is not None), None)


async def test_a_cancel_stops_a_running_job_at_once(pools) -> None:
    pool = await pools(slow(), lease_ms=600_000)  # renewals come too late to help
    job_id = await pool.submit("abc", max_tokens=100_000, ignore_eos=True)
    await wait_until(lambda: pool.log(job_id))
    assert await pool.scripts.cancel(job_id) == "cancelling"
    result = await pool.result(job_id)
    assert result.state == "cancelled"
    assert result.choices[0].finish_reason is FinishReason.CANCELLED
    assert result.error == CANCELLED
    assert result.usage.completion_tokens == len(result.choices[0].token_ids)
    await wait_until(lambda: ended(pool, job_id))
    assert (await ended(pool, job_id)).error == CANCELLED
    deltas = [delta for delta in await pool.log(job_id) if delta.end is None]
    published = [token for delta in deltas for token in delta.token_ids]
    assert list(result.choices[0].token_ids) == published


async def test_a_missed_cancel_comes_with_the_next_renewal(pools) -> None:
    pool = await pools(slow())
    job_id = await pool.submit("abc", max_tokens=100_000, ignore_eos=True)
    await wait_until(lambda: pool.log(job_id))
    with structlog.testing.capture_logs() as lines:
        await pool.client.hset(KEYS.job(job_id), "cancel", "1")
        assert (await pool.result(job_id)).state == "cancelled"
        await wait_until(lambda: any(line["event"] == "job" for line in lines))
    (line,) = [line for line in lines if line["event"] == "job"]
    assert (line["job"], line["error"]) == (job_id, "cancelled")


async def test_a_deadline_ends_a_running_job(pools) -> None:
    pool = await pools(slow())
    job_id = await pool.submit(
        "abc", deadline_ms=2000, max_tokens=100_000, ignore_eos=True
    )
    result = await pool.result(job_id)
    assert result.state == "expired"
    assert result.error == EXPIRED
    assert result.choices[0].token_ids


async def test_a_lost_job_is_dropped_and_its_neighbour_goes_on(pools) -> None:
    pool = await pools(slow())
    lost = await pool.submit("abc", max_tokens=100_000, ignore_eos=True)
    kept = await pool.submit("0123456789" * 8)
    await wait_until(lambda: pool.log(lost))
    await pool.client.hset(KEYS.job(lost), mapping={"epoch": 7, "owner": "other"})
    assert (await pool.result(kept)).text == "0123456789" * 8
    await wait_until(lambda: pool.worker._table.get(lost) is None)
    assert await pool.state(lost) == "running"


async def test_leases_are_renewed_while_a_job_runs(pools) -> None:
    pool = await pools(slow())
    job_id = await pool.submit("abc", max_tokens=100_000, ignore_eos=True)
    await wait_until(lambda: pool.log(job_id))
    first = await pool.client.zscore(KEYS.lease, job_id)

    async def renewed() -> bool:
        score = await pool.client.zscore(KEYS.lease, job_id)
        return score is not None and score > first

    await wait_until(renewed)
    assert await pool.scripts.cancel(job_id) == "cancelling"
    assert (await pool.result(job_id)).state == "cancelled"


async def test_a_drain_hands_back_at_no_cost(pools) -> None:
    pool = await pools(slow(), drain_s=0.1)
    job_id = await pool.submit("abc", max_tokens=100_000, ignore_eos=True)
    await wait_until(lambda: pool.log(job_id))
    pool.worker.drain()
    assert await asyncio.wait_for(asyncio.shield(pool.task), 60) == 0
    job = await pool.client.hgetall(KEYS.job(job_id))
    assert job[b"state"] == b"queued"
    assert job.get(b"attempts", b"0") == job.get(b"lease_losses", b"0") == b"0"
    assert await pool.client.exists(KEYS.group(pool.group)) == 0


async def test_a_drain_lets_short_jobs_end(pools) -> None:
    pool = await pools(slow(), drain_s=60)
    job_id = await pool.submit("a" * 30)
    await wait_until(lambda: pool.log(job_id))
    pool.worker.drain()
    assert await asyncio.wait_for(asyncio.shield(pool.task), 60) == 0
    assert (await pool.result(job_id)).state == "succeeded"


async def test_a_resumed_job_goes_on_without_gap_or_repeat(pools) -> None:
    first = await pools(slow(), drain_s=0.0)
    text = "".join(chr(97 + i % 26) for i in range(100))
    job_id = await first.submit(text)
    await wait_until(lambda: first.log(job_id))
    first.worker.drain()
    await asyncio.wait_for(asyncio.shield(first.task), 60)
    before = sum(len(delta.token_ids) for delta in await first.log(job_id))
    assert 0 < before < 100
    second = await pools(slow(1))
    await second.dispatch((job_id, text))
    result = await second.result(job_id)
    assert result.text == text
    deltas = [delta for delta in await second.log(job_id) if delta.end is None]
    assert "".join(delta.text for delta in deltas) == text
    offset = 0
    for delta in deltas:
        assert delta.offset == offset
        offset += len(delta.token_ids)


class BrokenEngine(EchoEngine):
    """Fails the first steps."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def step(self) -> StepOutput:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the device fell over")
        return super().step()


async def test_a_fault_costs_an_attempt_and_is_retried(pools) -> None:
    pool = await pools(BrokenEngine(1))
    job_id = await pool.submit("abc")

    async def retrying() -> bool:
        return await pool.state(job_id) == "retrying"

    await wait_until(retrying)
    job = await pool.client.hgetall(KEYS.job(job_id))
    assert job[b"attempts"] == b"1"
    assert b"the device fell over" in job[b"last_error"]
    assert (await pool.result(await pool.submit("next"))).text == "next"


async def test_an_engine_that_keeps_failing_ends_the_worker(pools) -> None:
    pool = await pools(BrokenEngine(1000))
    for text in ("one", "two", "three"):
        job_id = await pool.submit(text)

        async def gone(job_id: str = job_id) -> bool:
            return await pool.state(job_id) == "retrying"

        await wait_until(gone)
    assert await asyncio.wait_for(asyncio.shield(pool.task), 60) == EXIT_STUCK


class ChoosyEngine(EchoEngine):
    """Refuses some requests by a bug of its own."""

    def add(self, request: EngineRequest) -> None:
        if request.token_ids[0] == ord("!"):
            raise KeyError("no such thing")
        super().add(request)


async def test_a_refused_request_fails_alone(pools) -> None:
    pool = await pools(ChoosyEngine())
    bad, good = await pool.enqueue("!x"), await pool.enqueue("fine")
    await pool.dispatch((bad, "!x"), (good, "fine"))
    assert (await pool.result(good)).text == "fine"
    result = await pool.result(bad)
    assert (result.state, result.error.code) == ("failed", "engine_error")


async def test_heartbeats_carry_the_counters_of_the_engine(pools) -> None:
    pool = await pools(slow())
    await pool.result(await pool.submit("abc"))

    async def counted() -> bool:
        (info,) = await pool.scripts.groups()
        return info.counters.steps >= 3 and info.counters.scheduled_tokens >= 3

    await wait_until(counted)
    (info,) = await pool.scripts.groups()
    assert (info.counters.overruns, info.counters.num_running) == (0, 0)
    assert info.counters.free_blocks == info.total_blocks


async def test_the_tokenizer_goes_ahead_of_the_card(redis_client) -> None:
    herald = Herald(redis_client, KEYS)
    await asyncio.to_thread(herald.announce, "abc", b"bundle")
    await wait_until(lambda: redis_client.hget("tm:warm", MODEL))
    assert await redis_client.hget("tm:warm", MODEL) == b"abc"
    assert await redis_client.get("tm:tokenizer:abc") == b"bundle"
    assert await redis_client.smembers("tm:shards") == {KEYS.shard.encode()}
    assert not await redis_client.exists("tm:models")


async def test_lost_cards_are_published_again(pools) -> None:
    pool = await pools()
    await pool.client.delete("tm:models", KEYS.group(pool.group))

    async def back() -> bool:
        names = ("tm:models", KEYS.group(pool.group))
        return await pool.client.exists(*names) == 2

    await wait_until(back)
    assert (await pool.result(await pool.submit("still here"))).text == "still here"
