"""What the queue accepts: limits in Redis, measured retry-after, lateness."""

import asyncio
import time

import pytest
from support.shard_client import HOUR_MS, KEYS, Shard, new_job
from support.waiting import wait_until

from tokenmill.scheduler.ends_rate import MOST_ENDS, EndsRate, rate
from tokenmill.scheduler.groups import GroupReader
from tokenmill.scheduler.limits import keep_limits, limits_of
from tokenmill.shared.config import Config, LimitsConfig, TenantConfig
from tokenmill.shared.scripts import Limits, TenantLimits

MINUTE_MS = 60_000


@pytest.fixture
async def shard(redis_client):
    return await Shard(redis_client).open("g1")


async def now_ms(shard) -> int:
    seconds, microseconds = await shard.client.time()
    return seconds * 1000 + microseconds // 1000


async def measured(shard, *, tokens: float, busy_ms: float, jobs: float = 10) -> None:
    """Lets the shard have drained so much, as far as it remembers.

    The time is a little ahead, so that the figures do not fade during a test.
    """
    ahead = await now_ms(shard) + 5000
    fields = {"rate_jobs": jobs, "rate_tokens": tokens, "rate_busy": busy_ms}
    fields |= {"rate_ms": ahead, "rate_from": ahead}
    await shard.client.hset(KEYS.load, mapping=fields)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(max_waiting_jobs=2), "2 jobs wait and the limit is 2"),
        (Limits(max_waiting_tokens=25), "20 tokens wait, the job has 10"),
        (Limits(max_waiting_bytes=40), "payloads of 32 bytes wait, the job has 16"),
        (Limits(tenant_waiting_jobs=2), "2 jobs of this tenant wait"),
        (Limits(tenant_waiting_tokens=25), "20 tokens of this tenant wait"),
        (Limits(tenant_tokens_per_minute=60), "26 tokens and 8 of 60 are left"),
    ],
)
async def test_a_full_answer_names_limit_and_value_and_records_nothing(
    shard, limits, words
):
    ((name, value),) = [
        (name, getattr(limits, name))
        for name in limits.__struct_fields__
        if getattr(limits, name) != getattr(Limits(), name)
    ]
    await shard.scripts.write_limits(limits)
    jobs = [new_job() for _ in range(3)]
    replies = await shard.scripts.enqueue(jobs)
    assert [r.status for r in replies] == ["queued", "queued", "full"]
    assert replies[2].detail.startswith(f"{name}: ")
    assert words in replies[2].detail
    assert str(value) in replies[2].detail
    assert replies[2].retry_after_s > 0
    assert await shard.scripts.job(str(jobs[2].id)) is None
    assert not await shard.client.exists(KEYS.input(str(jobs[2].id)))
    assert (await shard.scripts.load())["jobs"] == "2"


async def test_the_scripts_defaults_are_those_of_the_settings(shard):
    assert Limits() == limits_of(Config())
    await shard.scripts.write_limits(Limits())
    for name in ("max_waiting_jobs", "max_waiting_tokens", "max_waiting_bytes"):
        most = getattr(Limits(), name)
        field = {"jobs": "jobs", "tokens": "tokens", "bytes": "bytes"}[name[12:]]
        await shard.client.hset(KEYS.load, mapping={"jobs": 1, field: most})
        written = (await shard.scripts.enqueue([new_job()]))[0]
        await shard.client.delete(KEYS.limits)
        absent = (await shard.scripts.enqueue([new_job()]))[0]
        await shard.client.delete(KEYS.load)
        assert written.status == absent.status == "full"
        assert written.detail == absent.detail
        assert str(most) in absent.detail


async def test_one_tenants_limit_stops_that_tenant_alone(shard):
    own = {"a": TenantLimits(waiting_jobs=1), "c": TenantLimits(waiting_jobs=9)}
    await shard.scripts.write_limits(Limits(tenant_waiting_jobs=2, tenants=own))
    replies = await shard.scripts.enqueue(
        [new_job(tenant=name) for name in "abcabcabcabc"]
    )
    accepted = [r.status for r in replies]
    assert accepted[0::3] == ["queued", "full", "full", "full"]
    assert accepted[1::3] == ["queued", "queued", "full", "full"]
    assert accepted[2::3] == ["queued"] * 4


async def test_one_job_larger_than_a_whole_limit_enters_an_empty_queue(shard):
    for limits in (
        Limits(max_waiting_tokens=5),
        Limits(max_waiting_bytes=5),
        Limits(tenant_waiting_tokens=5),
        Limits(tenant_tokens_per_minute=5),
    ):
        await shard.client.flushall()
        await shard.scripts.write_limits(limits)
        statuses = [(await shard.scripts.enqueue([new_job()]))[0].status for _ in "12"]
        assert statuses == ["queued", "full"]


async def test_retry_after_is_the_excess_over_the_measured_drain_rate(shard):
    await shard.scripts.write_limits(Limits(max_waiting_tokens=25))
    assert (await shard.scripts.enqueue([new_job()]))[0].status == "queued"
    blind = (await shard.scripts.enqueue([new_job(tokens=40)]))[0]
    assert blind.retry_after_s == 5.0  # nothing was drained yet
    await measured(shard, tokens=100, busy_ms=10_000)
    (reply,) = await shard.scripts.enqueue([new_job(tokens=40)])
    assert reply.retry_after_s == pytest.approx(25 / 10, rel=0.05)


async def test_retry_after_follows_what_ends_where_slots_hold_long_jobs(shard) -> None:
    """Ten were taken at once and run for minutes: the next place is long in coming."""
    await shard.scripts.write_limits(Limits(tenant_waiting_jobs=1))
    await shard.enqueue()
    await measured(shard, tokens=100, busy_ms=1000)
    quick = (await shard.scripts.enqueue([new_job()]))[0]
    assert quick.retry_after_s < 2
    ends = EndsRate(shard.client, KEYS)
    await ends.step()
    ends._waits_since_ms -= 20_000  # since when something waits, and nothing ended
    await ends.step()
    (reply,) = await shard.scripts.enqueue([new_job()])
    assert 20 <= reply.retry_after_s <= 60

    now = await now_ms(shard)
    for end, state in enumerate(["succeeded"] * 4 + ["cancelled", "expired"]):
        fields = {"id": "j", "state": state, "tenant": "default"}
        await shard.client.xadd(KEYS.done, fields, id=f"{now - 9000 + end}-1")
    await ends.step()
    (reply,) = await shard.scripts.enqueue([new_job()])
    assert 4.9 < reply.retry_after_s < 15  # four in these twenty seconds
    for limits in (Limits(max_waiting_tokens=10), Limits(max_waiting_bytes=16)):
        await shard.scripts.write_limits(limits)
        (reply,) = await shard.scripts.enqueue([new_job()])
        assert 4.9 < reply.retry_after_s < 15

    # What was measured long ago, as by a scheduler that is gone, says nothing.
    await shard.client.hset(KEYS.load, "rate_ends_ms", now - 60_000)
    await shard.scripts.write_limits(Limits(tenant_waiting_jobs=1))
    await measured(shard, tokens=100, busy_ms=1000)
    assert (await shard.scripts.enqueue([new_job()]))[0].retry_after_s < 2


async def test_ends_are_measured_while_something_waits(shard) -> None:
    ends = EndsRate(shard.client, KEYS)
    await ends.step()
    assert not await shard.client.exists(KEYS.load)
    job_id = await shard.enqueue()
    await ends.step()
    assert float((await shard.scripts.load())["rate_ends"]) > 0
    assert (await shard.dispatch(job_id)).status == "dispatched"
    await ends.step()
    assert ends._waits_since_ms is None


def test_of_a_quick_shard_the_newest_ends_count() -> None:
    assert rate(0, 20_000) == pytest.approx(0.05)
    assert rate(MOST_ENDS, 1000) == pytest.approx(200)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(tenant_waiting_jobs=8), "6 for bulk, three quarters of 8"),
        (Limits(tenant_waiting_tokens=80), "60 for bulk"),
        (Limits(max_waiting_jobs=8), "6 for bulk"),
        (Limits(max_waiting_tokens=80), "60 for bulk"),
        (Limits(max_waiting_bytes=8 * 16), "96 for bulk"),
    ],
)
async def test_bulk_leaves_a_quarter_of_each_limit_to_others(
    shard, limits, words
) -> None:
    await shard.scripts.write_limits(limits)
    bulk = [new_job(job_class="bulk") for _ in range(8)]
    replies = await shard.scripts.enqueue(bulk)
    assert [r.status for r in replies] == ["queued"] * 6 + ["full"] * 2
    assert words in replies[6].detail
    replies = await shard.scripts.enqueue([new_job() for _ in range(3)])
    assert [r.status for r in replies] == ["queued"] * 2 + ["full"]
    assert "bulk" not in replies[2].detail


async def test_bulk_gets_in_under_the_smallest_of_limits(shard) -> None:
    await shard.scripts.write_limits(Limits(max_waiting_jobs=1))
    replies = await shard.scripts.enqueue([new_job(job_class="bulk") for _ in "12"])
    assert [r.status for r in replies] == ["queued", "full"]


async def test_the_rate_is_that_of_the_time_when_something_waited(shard):
    for _ in range(40):
        assert (await shard.dispatch(await shard.enqueue())).status == "dispatched"
    load = await shard.scripts.load()
    assert load["drained_tokens"] == "400"
    assert float(load["rate_jobs"]) > 25  # less with the seconds that it took
    assert "rate_from" not in load  # nothing waits: the clock of the rate stands still
    assert float(load["rate_busy"]) < 5000
    await shard.enqueue()
    assert "rate_from" in await shard.scripts.load()


async def test_an_allowance_comes_back_and_leaves_nothing_behind(shard):
    own = {"metered": TenantLimits(tokens_per_minute=260)}
    await shard.scripts.write_limits(Limits(tenants=own))
    jobs = [new_job(tenant="metered") for _ in range(11)]
    began = time.monotonic()
    replies = await shard.scripts.enqueue([*jobs, new_job()])
    took_s = time.monotonic() - began
    assert [r.status for r in replies] == ["queued"] * 10 + ["full", "queued"]
    assert 5.9 - took_s <= replies[10].retry_after_s <= 6.1  # 26 of 260
    assert await shard.client.zrange(KEYS.rates, 0, -1) == [b"metered"]
    assert 0 < await shard.client.pttl(KEYS.rates) <= MINUTE_MS + 1000
    # Half a minute later:
    await shard.client.zincrby(KEYS.rates, -30_000, "metered")
    replies = await shard.scripts.enqueue(
        [new_job(tenant="metered", payload_hash=str(n)) for n in range(6)]
    )
    assert [r.status for r in replies] == ["queued"] * 5 + ["full"]
    # A tenant whose allowance is full again is forgotten when another uses its own.
    await shard.client.zadd(KEYS.rates, {"metered": await now_ms(shard) - 1})
    other = {"other": TenantLimits(tokens_per_minute=260)}
    await shard.scripts.write_limits(Limits(tenants=other))
    await shard.enqueue(tenant="other")
    assert await shard.client.zrange(KEYS.rates, 0, -1) == [b"other"]


async def test_duplicates_and_refusals_use_up_no_allowance(shard):
    own = {"default": TenantLimits(tokens_per_minute=60, waiting_jobs=1)}
    await shard.scripts.write_limits(Limits(tenants=own))
    job = new_job()
    for _ in range(5):
        await shard.scripts.enqueue([job])
        await shard.scripts.enqueue([new_job()])
    full_ms = await shard.client.zscore(KEYS.rates, "default")
    assert full_ms - await now_ms(shard) <= 26_000


async def test_limits_hold_while_jobs_are_delayed_and_go_with_a_cancel(shard):
    await shard.scripts.write_limits(Limits(tenant_waiting_jobs=1))
    job_id = await shard.enqueue(delay_ms=HOUR_MS)
    assert (await shard.scripts.enqueue([new_job()]))[0].status == "full"
    assert await shard.scripts.cancel(job_id) == "cancelled"
    assert (await shard.scripts.enqueue([new_job()]))[0].status == "queued"


async def test_an_absolute_time_is_a_delay_by_the_clock_of_redis(shard):
    due = await now_ms(shard) + HOUR_MS
    job_id = await shard.enqueue(not_before_ms=due, idempotency_key="k")
    assert await shard.state(job_id) == "delayed"
    assert await shard.client.zscore(KEYS.delayed, job_id) == due
    (again,) = await shard.scripts.enqueue([new_job(idempotency_key="k")])
    assert (again.status, again.job_id) == ("duplicate", job_id)
    assert await shard.state(await shard.enqueue(not_before_ms=1)) == "queued"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"deadline_ms": 9000}, "late"),  # 1000 tokens ahead at 100 a second: 10 s
        ({"deadline_ms": 11_000}, "queued"),
        ({"deadline_ms": 9000, "refuse_late": False}, "queued"),
        ({}, "queued"),
        # Bulk waits for both classes, 16 s; interactive work not for bulk.
        ({"deadline_ms": 15_000, "job_class": "bulk"}, "late"),
        ({"deadline_ms": 17_000, "job_class": "bulk"}, "queued"),
        # A tenant with little waiting has its turn long before the flood is done.
        ({"deadline_ms": 9000, "tenant": "small"}, "queued"),
        ({"deadline_ms": 3000, "delay_ms": 2500, "tenant": "small"}, "queued"),
        ({"deadline_ms": 600, "delay_ms": 500, "tenant": "small"}, "late"),
    ],
)
async def test_a_job_that_cannot_make_its_deadline_is_refused(shard, changes, status):
    await shard.scripts.write_limits(Limits(service_ms=200))
    for _ in range(10):
        await shard.enqueue(tokens=100)
    for _ in range(6):
        await shard.enqueue(tokens=100, job_class="bulk")
    await measured(shard, tokens=1000, busy_ms=10_000)
    job = new_job(**{"refuse_late": True, **changes})
    (reply,) = await shard.scripts.enqueue([job])
    assert reply.status == status
    if status == "late":
        assert reply.needed_s > changes["deadline_ms"] / 1000
        assert await shard.scripts.job(str(job.id)) is None


async def test_nothing_measured_refuses_nobody_and_a_standstill_does(shard):
    await shard.enqueue(tokens=100)
    hurried = {"refuse_late": True, "deadline_ms": 1000}
    assert (await shard.scripts.enqueue([new_job(**hurried)]))[0].status == "queued"
    long_ago = await now_ms(shard) - 600_000
    gone = {"rate_jobs": "5.0", "rate_tokens": "50.0", "rate_busy": "10.0"}
    gone |= {"rate_ms": long_ago, "rate_from": long_ago}
    await shard.client.hset(KEYS.load, mapping=gone)
    (reply,) = await shard.scripts.enqueue([new_job(**hurried)])
    assert reply.status == "late"
    assert reply.needed_s == pytest.approx(600, abs=10)


async def test_the_scheduler_writes_limits_and_writes_them_again(shard):
    config = Config(
        limits=LimitsConfig(max_waiting_jobs=7),
        tenants={"t": TenantConfig(waiting_jobs=3), "u": TenantConfig(weight=2.0)},
    )
    task = asyncio.create_task(
        keep_limits(shard.scripts, GroupReader(shard.client, KEYS), config)
    )
    try:
        found = await wait_until(lambda: shard.client.hgetall(KEYS.limits))
    finally:
        task.cancel()
    assert found[b"max_waiting_jobs"] == b"7"
    assert found[b"tenant:t:waiting_jobs"] == b"3"
    assert not [name for name in found if name.startswith(b"tenant:u")]
    assert await shard.client.ttl(KEYS.limits) == -1
    assert not await shard.scripts.write_limits(limits_of(config))
    assert await shard.scripts.write_limits(limits_of(Config()))
    assert b"tenant:t:waiting_jobs" not in await shard.client.hgetall(KEYS.limits)
    await shard.client.delete(KEYS.limits)
    await shard.client.set(KEYS.limits, "garbage")
    assert (await shard.scripts.enqueue([new_job()]))[0].status == "queued"
    assert await shard.scripts.write_limits(limits_of(config))


async def test_delayed_work_takes_room_and_is_before_nobody(shard):
    await shard.scripts.write_limits(Limits(tenant_waiting_jobs=3))
    due = await shard.enqueue(tokens=100, delay_ms=HOUR_MS)
    long_ago = await now_ms(shard) - 300_000
    gone = {"rate_jobs": "5.0", "rate_tokens": "50.0", "rate_busy": "10.0"}
    await shard.client.hset(KEYS.load, mapping={**gone, "rate_ms": long_ago})
    load = await shard.scripts.load()
    assert (load["later:jobs"], load["later:tokens"]) == ("1", "100")
    assert not {"jobs", "tokens", "tenants", "rate_from"} & load.keys()
    hurried = new_job(refuse_late=True, deadline_ms=60_000)
    assert (await shard.scripts.enqueue([hurried]))[0].status == "queued"
    await shard.overdue(KEYS.delayed, due)
    await shard.reap()
    load = await shard.scripts.load()
    assert (load["jobs"], load["tokens"], load["tenants"]) == ("2", "110", "1")
    assert not [name for name in load if name.startswith("later:")]


async def test_what_another_release_did_not_uncount_goes_with_the_last_job(shard):
    job_id = await shard.enqueue()
    left = {"bytes": 5000, "tenants": 3, "tenant:gone:jobs": 2}
    await shard.client.hset(KEYS.load, mapping=left)
    assert (await shard.dispatch(job_id)).status == "dispatched"
    kept = await shard.scripts.load()
    assert not [name for name in kept if not name.startswith(("rate_", "drained"))]
