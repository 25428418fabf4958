"""What the scheduler feeds its policy: weights, suspects, bulk, what jobs made."""

import redis.asyncio
from msgspec.structs import replace
from support.scheduled_pool import CONFIG, KEYS, Pool, new_job, scheduling
from support.waiting import wait_until

from tokenmill.scheduler.learning import MadeRatio
from tokenmill.shared.config import TenantConfig
from tokenmill.shared.keys import lane_of
from tokenmill.shared.messages import JobResult, Usage, encode
from tokenmill.shared.scripts import FinishItem

LANE = lane_of("t")


async def test_tenants_share_by_their_weights(redis_client: "redis.asyncio.Redis"):
    config = replace(CONFIG, tenants={"paid": TenantConfig(weight=3.0)})
    pool = Pool(redis_client)
    await pool.group(max_running=8)
    jobs = [new_job(tenant=name) for name in ("paid", "free") for _ in range(8)]
    await pool.enqueue(*jobs)
    async with scheduling(redis_client, config):
        started = await pool.work(8)
    tenants = [job.tenant for job in started]
    assert (tenants.count("paid"), tenants.count("free")) == (6, 2)


async def test_a_suspect_waits_for_an_empty_group_and_then_has_it_alone(
    redis_client: "redis.asyncio.Redis",
):
    pool = Pool(redis_client)
    await pool.group()
    (suspect,) = await pool.enqueue(new_job())
    # As the reaper leaves a job of which two workers died.
    fields = await redis_client.xrange(KEYS.queue("interactive", "128", LANE))
    (entry, values) = fields[0]
    again = {**values, b"class": b"interactive", b"losses": b"2"}
    moved = await redis_client.xadd(KEYS.resume, again)
    await redis_client.xdel(KEYS.queue("interactive", "128", LANE), entry)
    place = {"entry": moved, "entry_key": KEYS.resume, "lease_losses": 2}
    await redis_client.hset(KEYS.job(suspect), mapping=place)
    async with scheduling(redis_client):
        (first,) = await pool.work(1)
        assert first.job_id == suspect
        assert await redis_client.hget(KEYS.group("w-1"), "alone") == suspect.encode()
        (other,) = await pool.enqueue(new_job())
        assert await pool.state(other) == "queued"
        await pool.finish([first])

        async def given() -> bool:
            return await pool.state(other) == "dispatched"

        await wait_until(given, what="the neighbour's turn")
        assert not await redis_client.hget(KEYS.group("w-1"), "alone")


async def test_an_interactive_job_goes_where_bulk_holds_every_slot(
    redis_client: "redis.asyncio.Redis",
):
    pool = Pool(redis_client)
    await pool.group(max_running=2)
    await pool.enqueue(*(new_job(job_class="bulk") for _ in range(4)))
    async with scheduling(redis_client):
        started = await pool.work(2)
        assert {job.job_class for job in started} == {"bulk"}
        (urgent,) = await pool.enqueue(new_job())

        async def given() -> bool:
            return await pool.state(urgent) == "dispatched"

        await wait_until(given, what="the interactive job's dispatch")
    assert await redis_client.hget(KEYS.group("w-1"), "credit_running") == b"-1"


async def test_it_learns_what_jobs_make_of_what_they_ask_for(
    redis_client: "redis.asyncio.Redis",
):
    pool = Pool(redis_client)
    await pool.group()
    await pool.enqueue(*(new_job(max_tokens=40) for _ in range(2)))
    async with scheduling(redis_client):
        started = await pool.work(2)
    for job in started:
        result = JobResult(
            id=job.job_id,
            state="succeeded",
            model="tiny",
            usage=Usage(prompt_tokens=5, completion_tokens=10),
        )
        item = FinishItem(
            job_id=job.job_id,
            epoch=job.epoch,
            seq=1,
            state="succeeded",
            result=encode(result),
            end=b"{}",
        )
        await pool.scripts.finish(group="w-1", items=[item])
    ratio = MadeRatio(redis_client, KEYS)
    await ratio.step()
    assert ratio.by_class == {"interactive": 0.25}
    # What a stranger wrote is left out, and nothing is counted twice.
    await redis_client.set(KEYS.output(started[0].job_id), b"no result")
    await ratio.step()
    assert ratio.by_class == {"interactive": 0.25}


async def test_a_record_newer_than_its_payload_waits_for_a_group_that_reads_it(
    redis_client: "redis.asyncio.Redis",
):
    """The payload says 1 and the record 2, which is what the group would read."""
    pool = Pool(redis_client)
    await pool.group(schema=1)
    async with scheduling(redis_client):
        newer = new_job("newer", v=2)
        await pool.enqueue(newer, new_job("plain"))
        (plain,) = await pool.work(1)
        assert plain.job_id != str(newer.id)
        assert await pool.state(str(newer.id)) == "queued"
        await pool.group("w-2", schema=2)
        pool.cursor = b"0"
        (started,) = await pool.work(1, "w-2")
        assert started.job_id == str(newer.id)
