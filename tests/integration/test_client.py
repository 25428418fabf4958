"""The client against real Redis and a group that echoes words."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import time

import msgspec
import pytest
import redis.asyncio
from support.fake_group import FakeGroup, card
from support.waiting import loop_turns, wait_until

from tokenmill import Client, Message, Prompt, Sampling
from tokenmill.producer import pool_view
from tokenmill.scheduler.housekeeping import trim
from tokenmill.shared.errors import (
    ConfigError,
    DeadlineUnreachable,
    IdempotencyConflict,
    InvalidBatch,
    InvalidRequest,
    JobCancelled,
    JobExpired,
    JobFailed,
    ModelUnavailable,
    PayloadTooLarge,
    QueueFull,
    RedisUnavailable,
    RedisUnsuitable,
    ResultTimeout,
    TokenmillError,
    UnknownJob,
)
from tokenmill.shared.keys import MODELS, JobId, Keys, new_unique
from tokenmill.shared.messages import DEFAULT_MODEL, PoolCard, encode
from tokenmill.shared.scripts import Limits, TenantLimits

UNKNOWN = f"{DEFAULT_MODEL}.0.{'0' * 31}"


@pytest.fixture
async def mill(redis_server, redis_client):
    async with Client(redis_server.url, patience_s=5) as client:
        yield client


@pytest.fixture
async def group(redis_client):
    async with FakeGroup(redis_client) as fake:
        yield fake


async def test_a_prompt_comes_back_as_a_result(mill, group) -> None:
    job = await mill.submit("hello wide world")
    result = await job.result(timeout=60)
    assert result.text == "hello wide world"
    assert result.id == job.id
    assert (await job.info()).state == "succeeded"
    assert await job.done()


async def test_messages_and_options_arrive_as_they_were_sent(mill, group) -> None:
    seen = []
    group.answer = lambda request: seen.append(request) or ["ok"]
    prompt = Prompt(
        messages=(Message("system", "be brief"), Message("user", "hi")),
        sampling=Sampling(temperature=0.5, top_k=3, logit_bias={7: -1.5}, n=2),
        job_class="bulk",
        tenant="team-a",
        control_tokens="as_text",
    )
    job = await mill.submit(prompt)
    assert len((await job.result(60)).choices) == 2
    assert seen[0].messages == prompt.messages
    assert seen[0].sampling == prompt.sampling
    assert seen[0].control_tokens == "as_text"
    info = await job.info()
    assert (info.job_class, info.tenant, info.max_tokens) == ("bulk", "team-a", 256)


async def test_another_process_finds_the_job_by_its_id(
    mill, group, redis_server
) -> None:
    job = await mill.submit("hello")
    async with Client(redis_server.url) as other:
        assert (await other.job(job.id).result(60)).text == "hello"
        assert [info.id for info in await other.jobs(5)] == [job.id]


async def test_a_failed_job_raises_what_was_recorded(mill, group) -> None:
    def answer(request):
        raise ValueError("no luck today")

    group.answer = answer
    job = await mill.submit("hello")
    with pytest.raises(JobFailed, match="no luck today") as caught:
        await job.result(60)
    assert caught.value.error_code == "engine_error"
    assert type(caught.value) is JobFailed


async def test_a_time_out_leaves_the_job_alone(mill, group) -> None:
    await group.pause()
    job = await mill.submit("hello")
    with pytest.raises(ResultTimeout, match="goes on"):
        await job.result(timeout=0.1)
    group.serving.set()
    assert (await job.result(60)).text == "hello"


async def test_a_waiting_job_is_cancelled_at_once(mill, group) -> None:
    await group.pause()
    job = await mill.submit("hello")
    assert await job.cancel() == "cancelled"
    with pytest.raises(JobCancelled):
        await job.result(60)
    assert await job.cancel() in ("cancelled", "succeeded")


async def test_a_running_job_stops_when_cancelled(mill, group) -> None:
    group.delay_s = 0.02
    job = await mill.submit("a " * 1000)
    async for _ in job.stream():
        break
    assert await job.cancel() == "cancelling"
    with pytest.raises(JobCancelled):
        await job.result(60)


async def test_a_deadline_in_the_queue_is_an_expiry(mill, group) -> None:
    await group.pause()
    job = await mill.submit(Prompt("hello", deadline_s=0.05))
    fence = await group.scripts.acquire_scheduler(group.name, 60_000)

    async def reaped():
        await group.scripts.reap(fence=fence, limit=10)
        return await job.done()

    await wait_until(reaped, what="the expiry")
    with pytest.raises(JobExpired):
        await job.result(60)


async def test_unknown_ids_are_said_to_be_unknown(mill, group) -> None:
    with pytest.raises(UnknownJob, match="cannot be a job id"):
        mill.job("nonsense")
    job = mill.job(UNKNOWN)
    for call in (job.result(60), job.info(), job.cancel(), job.done()):
        with pytest.raises(UnknownJob, match="retention"):
            await call


async def test_the_same_idempotency_key_is_the_same_job(mill, group) -> None:
    first = await mill.submit(Prompt("hello", idempotency_key="k1"))
    again = await mill.submit(Prompt("hello", idempotency_key="k1"))
    assert (again.id, again.duplicate, first.duplicate) == (first.id, True, False)
    with pytest.raises(IdempotencyConflict, match="k1"):
        await mill.submit(Prompt("other", idempotency_key="k1"))
    elsewhere = await mill.submit(Prompt("x", idempotency_key="k1", tenant="t2"))
    assert elsewhere.id != first.id


async def test_a_model_without_a_worker_is_said_at_submit(mill, redis_client) -> None:
    with pytest.raises(ModelUnavailable, match="not known"):
        await mill.submit("hello")
    job = await mill.submit("hello", when_unserved="wait")
    async with FakeGroup(redis_client) as group:
        assert (await job.result(60)).text == "hello"
        with pytest.raises(ModelUnavailable, match=f"served now: {DEFAULT_MODEL}"):
            await mill.submit(Prompt("hello", model="other"))
        await group.leave()
        mill._session.view._models.clear()
        with pytest.raises(ModelUnavailable, match="has no live worker"):
            await mill.submit("hello")


async def test_a_group_with_an_old_heartbeat_does_not_count(
    mill, group, redis_client, monkeypatch
) -> None:
    monkeypatch.setattr(pool_view, "HEARD_S", 0)  # this server has just started
    seconds, _ = await redis_client.time()
    await group.die()
    await redis_client.zadd(group.keys.groups, {group.name: (seconds - 16) * 1000})
    with pytest.raises(ModelUnavailable, match="has no live worker"):
        await mill.submit("hello")


async def test_wrong_prompts_never_reach_the_queue(mill, group, redis_client) -> None:
    for prompt, field in [
        (Prompt(""), "text"),
        (Prompt("x", sampling=Sampling(temperature=-1)), "sampling.temperature"),
        (Prompt("x", sampling=Sampling(max_tokens=9000)), "sampling.max_tokens"),
        (3, "prompt"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            await mill.submit(prompt)
        assert caught.value.field == field
    with pytest.raises(PayloadTooLarge, match="4194304"):
        await mill.submit("x" * 50_000_000)
    with pytest.raises(PayloadTooLarge, match="4194304"):
        await mill.submit("\x01" * 1_000_000)  # six bytes each in JSON
    assert not await redis_client.exists(group.keys.recent)


async def test_a_batch_reports_all_errors_and_enqueues_nothing(
    mill, group, redis_client
) -> None:
    prompts = ["ok", Prompt(""), "fine", Prompt("x", priority=1000)]
    with pytest.raises(InvalidBatch) as caught:
        await mill.submit_many(prompts)
    assert list(caught.value.errors) == [1, 3]
    assert "[1] text" in str(caught.value)
    assert "[3] priority" in str(caught.value)
    assert not await redis_client.exists(group.keys.recent)


async def test_many_jobs_complete_each_exactly_once(mill, group) -> None:
    await group.pause()
    texts = [f"number {i}" for i in range(1500)]
    jobs = await mill.submit_many(texts)
    assert len({job.id for job in jobs}) == 1500
    expected = {job.id: text for job, text in zip(jobs, texts, strict=True)}
    early, late = jobs[:700], jobs[700:]
    await early[0].cancel()
    group.serving.set()
    await wait_until(lambda: group.num_finished > 200)
    found = {}
    async for job in mill.as_completed([*early, *(j.id for j in late), early[0]]):
        assert job.id not in found
        try:
            found[job.id] = (await job.result(0)).text
        except JobCancelled:
            found[job.id] = "cancelled"
    assert found.pop(early[0].id) == "cancelled"
    del expected[early[0].id]
    assert found == expected


async def test_as_completed_yields_unknown_jobs_too(mill, group) -> None:
    known = await mill.submit("hello")
    outcomes = {}
    async for job in mill.as_completed([known, UNKNOWN]):
        try:
            outcomes[job.id] = (await job.result()).text
        except UnknownJob:
            outcomes[job.id] = None
    assert outcomes == {known.id: "hello", UNKNOWN: None}
    assert [job async for job in mill.as_completed([])] == []


async def test_leaving_as_completed_early_unsubscribes(mill, group) -> None:
    await group.pause()
    jobs = await mill.submit_many(["a", "b"])
    completions = mill.as_completed(jobs)
    waiting = asyncio.ensure_future(anext(completions))
    await wait_until(lambda: mill._session.listener._watchers)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await completions.aclose()
    assert not mill._session.listener._watchers


async def test_a_full_queue_is_an_error_or_waited_out(mill, group) -> None:
    await group.scripts.write_limits(Limits(max_waiting_jobs=3))
    await group.pause()
    with pytest.raises(QueueFull) as caught:
        await mill.submit_many(["a", "b", "c", "d"], when_full="raise")
    assert len(caught.value.enqueued) == 3
    assert caught.value.retry_after_s > 0
    assert caught.value.limit == "max_waiting_jobs"
    assert list(caught.value.refused) == [3]
    with pytest.raises(QueueFull, match="3 jobs wait and the limit is 3"):
        await mill.submit("d", when_full="wait", wait_s=0.1)
    waiting = asyncio.ensure_future(mill.submit("d", when_full="wait"))
    group.serving.set()
    job = await asyncio.wait_for(waiting, 60)
    assert (await job.result(60)).text == "d"
    for job_id in caught.value.enqueued:
        assert (await mill.job(job_id).result(60)).text in "abc"


async def test_a_job_of_an_earlier_call_is_not_told_as_enqueued_by_one_that_fails(
    mill, group
) -> None:
    """Who takes back what a failed call enqueued must leave the earlier job alone."""
    await group.scripts.write_limits(Limits(max_waiting_jobs=2))
    await group.pause()
    known = Prompt("a", idempotency_key="known")
    first = await mill.submit(known)
    with pytest.raises(QueueFull) as caught:
        await mill.submit_many([known, "b", "c"], when_full="raise")
    assert len(caught.value.enqueued) == 1
    assert first.id not in caught.value.enqueued


async def test_a_tenant_that_is_full_holds_up_nobody_else(mill, group) -> None:
    own = {"noisy": TenantLimits(waiting_jobs=2)}
    await group.scripts.write_limits(Limits(tenants=own))
    await group.pause()
    prompts = [
        Prompt(f"{n}", tenant="quiet" if n % 3 == 2 else "noisy") for n in range(900)
    ]
    waiting = asyncio.ensure_future(mill.submit_many(prompts, wait_s=1.0))

    async def quiet_ones_wait():
        return int((await group.scripts.load()).get("tenant:quiet:jobs", 0)) == 300

    await wait_until(quiet_ones_wait, what="the other tenant's jobs")
    with pytest.raises(QueueFull) as caught:
        await waiting
    assert caught.value.limit == "tenant_waiting_jobs"
    assert len(caught.value.enqueued) == 302
    refused = caught.value.refused
    # Which two of its jobs find room is open: two calls of a shard are under way.
    assert len(refused) == 598
    assert refused.keys() <= {n for n in range(900) if n % 3 != 2}


async def test_concurrent_submits_share_calls_and_fail_alone(
    mill, group, monkeypatch
) -> None:
    await group.pause()
    await mill.submit(Prompt("first", idempotency_key="k"))
    scripts = mill._session.scripts(Keys(DEFAULT_MODEL, 0))
    original, sizes = scripts.enqueue, []

    async def counted(jobs):
        sizes.append(len(jobs))
        return await original(jobs)

    monkeypatch.setattr(scripts, "enqueue", counted)
    submits = [asyncio.ensure_future(mill.submit(f"job {n}")) for n in range(48)]
    wrong = asyncio.ensure_future(mill.submit(Prompt("other", idempotency_key="k")))
    leaver = asyncio.ensure_future(mill.submit("leaver"))
    await loop_turns()
    leaver.cancel()
    jobs = await asyncio.gather(*submits)
    assert sizes == [49]
    with pytest.raises(IdempotencyConflict):
        await wrong
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert len({job.id for job in jobs}) == 48
    group.serving.set()
    assert [(await j.result(60)).text for j in jobs] == [f"job {n}" for n in range(48)]


async def test_a_group_of_submits_that_redis_refuses_fails_each_by_itself(
    mill, group, monkeypatch
) -> None:
    async def refusing(jobs):
        raise RedisUnsuitable(f"{len(jobs)} jobs: out of memory")

    await mill.submit("the model's card is read")
    monkeypatch.setattr(
        mill._session.scripts(Keys(DEFAULT_MODEL, 0)), "enqueue", refusing
    )
    errors = await asyncio.gather(
        *(mill.submit("x") for _ in range(3)), return_exceptions=True
    )
    assert {type(error) for error in errors} == {RedisUnsuitable}
    assert {str(error) for error in errors} == {"3 jobs: out of memory"}
    assert len({id(error) for error in errors}) == 3


async def test_a_late_job_is_refused_when_it_asks_for_that(mill, group) -> None:
    hurried = Prompt("hurried", deadline_s=0.5, refuse_late=True)
    await group.pause()
    assert await mill.submit(hurried)  # nothing was measured yet
    # 10 tokens in the 5 s that something waited: 2 a second.
    seconds, _ = await group.redis.time()
    measured = {"rate_jobs": 5, "rate_tokens": 10, "rate_busy": 5000}
    measured |= {"rate_ms": seconds * 1000 + 2000, "rate_from": seconds * 1000 + 2000}
    await group.redis.hset(group.keys.load, mapping=measured)
    await mill.submit("x" * 70)
    with pytest.raises(DeadlineUnreachable) as caught:
        await mill.submit(hurried)
    assert caught.value.deadline_s == 0.5
    assert 5 < caught.value.needed_s < 20
    assert "its deadline is in 0.5 s" in str(caught.value)
    assert await mill.submit(Prompt("later", deadline_s=60, refuse_late=True))
    assert await mill.submit(Prompt("hurried", deadline_s=0.5))
    with pytest.raises(InvalidRequest, match="without a deadline"):
        await mill.submit(Prompt("x", refuse_late=True))


async def test_a_job_for_a_time_to_come_waits_for_it(mill, group) -> None:
    tomorrow = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    job = await mill.submit(Prompt("later", not_before=tomorrow))
    assert (await job.info()).state == "delayed"
    due_ms = await group.redis.zscore(group.keys.delayed, job.id)
    assert due_ms == round(tomorrow.timestamp() * 1000)
    assert await job.cancel() == "cancelled"
    past = dt.datetime(2001, 1, 1, tzinfo=dt.UTC)
    assert (await (await mill.submit(Prompt("now", not_before=past))).result(60)).text
    for wrong, words in (
        (Prompt("x", not_before=dt.datetime(2030, 1, 1)), "no time zone"),  # noqa: DTZ001
        (Prompt("x", not_before=tomorrow, delay_s=1), "beside a delay"),
        (Prompt("x", not_before=tomorrow, deadline_s=5), "before the job is due"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            await mill.submit(wrong)


async def test_a_lost_reply_does_not_enqueue_twice(mill, group, monkeypatch) -> None:
    scripts = mill._session.scripts(Keys(DEFAULT_MODEL, 0))
    original, calls = scripts.enqueue, 0

    async def lossy(jobs):
        nonlocal calls
        calls += 1
        replies = await original(jobs)
        if calls == 1:
            raise redis.asyncio.ConnectionError("the reply was lost")
        return replies

    monkeypatch.setattr(scripts, "enqueue", lossy)
    job = await mill.submit("hello")
    assert calls == 2
    assert not job.duplicate
    assert (await job.result(60)).text == "hello"
    assert [info.id for info in await mill.jobs()] == [job.id]


async def next_millisecond(client) -> None:
    async def now_ms() -> int:
        seconds, microseconds = await client.time()
        return seconds * 1000 + microseconds // 1000

    begin = await now_ms()

    async def is_over() -> bool:
        return await now_ms() > begin

    await wait_until(is_over, every_s=0, what="the next millisecond")


async def test_jobs_are_listed_newest_first_and_by_state(
    mill, group, redis_client
) -> None:
    jobs = []
    for index in range(4):
        jobs.append(await mill.submit(f"job {index}"))
        await jobs[-1].result(60)
        await next_millisecond(redis_client)  # the list is ordered by them
    await group.pause()
    waiting = await mill.submit("waiting")
    assert [i.id for i in await mill.jobs(3)] == [waiting.id, jobs[3].id, jobs[2].id]
    assert [i.id for i in await mill.jobs(9, state="queued")] == [waiting.id]
    assert len(await mill.jobs(2, state="succeeded")) == 2


async def test_jobs_whose_records_are_gone_take_no_place_in_the_list(
    mill, group, redis_client
) -> None:
    there = await mill.submit("there")
    gone = [str(JobId(DEFAULT_MODEL, 0, new_unique())) for _ in range(20)]
    later = dict.fromkeys(gone, 9e15)  # as a bulk run's, newer than all
    await redis_client.zadd(group.keys.recent, later)
    assert [info.id for info in await mill.jobs(5)] == [there.id]
    await trim(redis_client, group.keys)
    names = await redis_client.zrange(group.keys.recent, 0, -1)
    assert names == [there.id.encode()]


async def test_models_tell_who_serves_them(mill, group, redis_client) -> None:
    await redis_client.hset(MODELS, "idle", encode(card("idle")))
    found = {info.name: info.num_groups for info in await mill.models()}
    assert found == {DEFAULT_MODEL: 1, "idle": 0}


async def test_two_partitions_are_served_and_listed(redis_server, redis_client):
    pool = PoolCard(models=(DEFAULT_MODEL,), partitions=2)
    second = Keys(DEFAULT_MODEL, 1)
    prompts = [f"job {i}" for i in range(40)]
    async with (
        Client(redis_server.url) as mill,
        FakeGroup(redis_client, pool=pool),
    ):
        with pytest.raises(ModelUnavailable):
            await mill.submit_many(prompts)
        async with FakeGroup(redis_client, keys=second, pool=pool):
            jobs = await mill.submit_many(prompts)
            assert {job.shard.partition for job in jobs} == {0, 1}
            assert [(await job.result(60)).text for job in jobs] == prompts
            assert len(await mill.jobs(100)) == 40


async def test_an_outage_shorter_than_the_patience_is_not_an_error() -> None:
    from support.servers import SERVERS, running

    with running(SERVERS[-1], "--appendonly", "yes", "--appendfsync", "always") as s:
        connection = redis.asyncio.Redis.from_url(s.url)
        async with Client(s.url, patience_s=20) as mill:
            async with FakeGroup(connection) as group:
                await group.pause()
                job = await mill.submit("hello")
                await group.die()
            waiting = asyncio.ensure_future(job.result(timeout=60))
            await wait_until(lambda: mill._session.listener._watchers)
            s.kill()
            submitting = asyncio.ensure_future(
                mill.submit("again", when_unserved="wait")
            )
            done, _ = await asyncio.wait({waiting, submitting}, timeout=0.2)
            assert not done, "nothing answers yet"
            s.start()
            again = await submitting
            async with FakeGroup(connection):
                assert (await waiting).text == "hello"
                assert (await again.result(60)).text == "again"
        await connection.aclose()


async def test_a_pool_that_is_not_there_is_said_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(RedisUnavailable):
        await Client("redis://127.0.0.1:1/0").open()
    assert time.monotonic() - begin < 20
    with pytest.raises(ConfigError):
        await Client("http://nowhere").open()


async def test_an_unopened_or_closed_client_says_so(redis_server) -> None:
    with pytest.raises(TokenmillError, match="not open"):
        await Client(redis_server.url).submit("hello")
    client = Client(redis_server.url)
    await client.open()
    await client.open()
    await client.close()
    await client.close()
    with pytest.raises(TokenmillError, match="not open"):
        await client.jobs()


async def test_closing_ends_every_wait(redis_server, group) -> None:
    await group.pause()
    for begun in (False, True):
        async with Client(redis_server.url) as mill:
            job = await mill.submit("hello")
            waits = [
                asyncio.ensure_future(job.result()),
                asyncio.ensure_future(anext(job.stream())),
                asyncio.ensure_future(anext(mill.as_completed([job]))),
            ]
            await wait_until(
                lambda m=mill, b=begun: (
                    m._session.listener._link if b else m._session.listener._links
                ),
                every_s=0,
            )
        outcomes = await asyncio.wait_for(
            asyncio.gather(*waits, return_exceptions=True), 60
        )
        assert [str(o) for o in outcomes] == [
            "the client was closed during the call"
        ] * 3


async def test_the_url_is_found_in_the_environment(
    redis_server, redis_client, monkeypatch
) -> None:
    monkeypatch.setenv("TOKENMILL_URL", redis_server.url)
    async with Client() as mill:
        assert await mill.jobs() == []


async def test_records_are_plain_structs(mill, group) -> None:
    job = await mill.submit("hello")
    await job.result(60)
    info = await job.info()
    assert msgspec.json.decode(encode(info))["id"] == job.id
    assert not dataclasses.is_dataclass(info)
