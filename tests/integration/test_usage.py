"""What tenants have used: counted once for each job, however it ends."""

import json

import pytest
import redis
import redis.asyncio
from support.shard_client import KEYS, Shard, delta, ending_of, new_job
from typer.testing import CliRunner

from tokenmill import Client, SyncClient
from tokenmill.__main__ import build_app
from tokenmill.scheduler.old_usage import remove_old_usage
from tokenmill.shared.errors import InvalidRequest
from tokenmill.shared.keys import SHARDS, Keys
from tokenmill.shared.messages import Usage
from tokenmill.shared.script_sources import load_script
from tokenmill.shared.scripts import EmitItem, FinishItem
from tokenmill.shared.usage import DAY_MS, date_of, day_and_tenant, numbers_of

USAGE = Usage(prompt_tokens=12, completion_tokens=5)


@pytest.fixture
async def shard(redis_client):
    return await Shard(redis_client).open("g1", "g2")


async def used(shard, tenant="default"):
    """The six numbers of today, or yesterday where the day has just ended."""
    rows = await shard.client.hgetall(KEYS.usage)
    found = [
        numbers_of(value.decode())
        for field, value in rows.items()
        if day_and_tenant(field.decode())[1] == tenant
    ]
    return tuple(map(sum, zip(*found, strict=True))) if found else (0,) * 6


async def test_what_the_owner_tells_is_counted_once(shard):
    job_id, epoch = await shard.run(tenant="acme")
    assert await shard.finish(job_id, epoch, usage=USAGE) == "recorded"
    assert await used(shard, "acme") == (1, 0, 0, 0, 12, 5)
    for _ in range(2):
        assert await shard.finish(job_id, epoch, usage=USAGE) == "duplicate"
    assert await shard.scripts.cancel(job_id) == "succeeded"
    assert await used(shard, "acme") == (1, 0, 0, 0, 12, 5)
    assert await used(shard) == (0,) * 6


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("failed", (0, 1, 0, 0, 12, 5)),
        ("cancelled", (0, 0, 1, 0, 12, 5)),
        ("expired", (0, 0, 0, 1, 12, 5)),
    ],
)
async def test_other_ends_count_what_was_produced(shard, state, expected):
    job_id, epoch = await shard.run()
    await shard.finish(job_id, epoch, state=state, usage=USAGE)
    assert await used(shard) == expected


async def test_a_batch_of_ends_is_summed_by_tenant(shard):
    items = []
    for number in range(6):
        job_id, epoch = await shard.run(tenant=f"t{number % 2}")
        usage = Usage(prompt_tokens=10, completion_tokens=number)
        result, end = ending_of(job_id, "succeeded", usage)
        items.append(
            FinishItem(
                job_id=job_id,
                epoch=epoch,
                seq=1,
                state="succeeded",
                result=result,
                end=end,
            )
        )
    await shard.scripts.finish(group="g1", items=items)
    assert await used(shard, "t0") == (3, 0, 0, 0, 30, 6)
    assert await used(shard, "t1") == (3, 0, 0, 0, 30, 9)


async def test_a_job_that_never_ran_used_no_tokens(shard):
    queued, late = await shard.enqueue(), await shard.enqueue(deadline_ms=10_000)
    assert await shard.scripts.cancel(queued) == "cancelled"
    await shard.overdue(KEYS.deadline, late)
    await shard.reap()
    bad = await shard.enqueue()
    result, end = ending_of(bad, "failed")
    assert await shard.scripts.reject(
        fence=shard.fence, job_id=bad, state="failed", result=result, end=end
    )
    assert await used(shard) == (0, 1, 1, 1, 0, 0)


async def test_a_deadline_that_passes_counts_what_the_log_holds(shard):
    job_id, epoch = await shard.run(deadline_ms=10_000)
    for seq, offset in ((1, 0), (2, 3)):
        item = EmitItem(job_id, epoch, seq, delta(offset, 3))
        await shard.scripts.emit(group="g1", items=[item])
    await shard.overdue(KEYS.deadline, job_id)
    assert (await shard.reap()).expired == 1
    assert await used(shard) == (0, 0, 0, 1, 12, 6)


async def test_every_choice_of_a_log_counts_also_one_that_ended_long_ago(shard):
    job_id = await shard.enqueue(deadline_ms=10_000)
    reply = await shard.dispatch(job_id, choices=3)
    await shard.start(job_id, reply.epoch)
    deltas = [delta(0, 2, 1), *(delta(i, 1, 0) for i in range(300))]
    deltas.append(delta(0, 4, 2))
    items = [EmitItem(job_id, reply.epoch, n + 1, d) for n, d in enumerate(deltas)]
    await shard.scripts.emit(group="g1", items=items)
    await shard.overdue(KEYS.deadline, job_id)
    await shard.reap()
    assert await used(shard) == (0, 0, 0, 1, 12, 2 + 300 + 4)


async def test_text_in_a_delta_that_looks_like_one_is_not_read(shard):
    job_id, epoch = await shard.run(deadline_ms=10_000)
    text = '"token_ids":[1,2,3,4,5,6],"offset":900,"choice":7'
    sent = json.dumps({"token_ids": [1], "text": text}).encode()
    sent = sent.replace(b": ", b":").replace(b", ", b",")
    await shard.scripts.emit(group="g1", items=[EmitItem(job_id, epoch, 1, sent)])
    await shard.overdue(KEYS.deadline, job_id)
    await shard.reap()
    assert await used(shard) == (0, 0, 0, 1, 12, 1)


async def test_a_job_that_ran_several_times_counts_once(shard):
    job_id, epoch = await shard.run()
    await shard.emit(job_id, epoch, 1, 0)
    assert await shard.fail(job_id, epoch) == "retrying"
    assert await used(shard) == (0,) * 6
    await shard.overdue(KEYS.delayed, job_id)
    await shard.reap()
    epoch = await shard.run_again(job_id)
    await shard.overdue(KEYS.lease, job_id)
    assert (await shard.reap()).redelivered == 1
    assert await used(shard) == (0,) * 6
    assert await shard.scripts.cancel(job_id) == "cancelled"
    # What it had produced until then is in its log.
    assert await used(shard) == (0, 0, 1, 0, 12, 1)


async def test_a_fault_that_is_the_last_counts_what_the_owner_tells(shard):
    job_id, epoch = await shard.run()
    assert await shard.fail(job_id, epoch, max_attempts=1, usage=USAGE) == "failed"
    assert await used(shard) == (0, 1, 0, 0, 12, 5)
    other, epoch = await shard.run()
    await shard.emit(other, epoch, 1, 0)
    await shard.scripts.cancel(other)
    assert await shard.fail(other, epoch, usage=USAGE) == "cancelled"
    assert await used(shard) == (0, 1, 1, 0, 24, 6)
    third, epoch = await shard.run()
    await shard.scripts.cancel(third)
    assert await shard.scripts.release(group="g1", jobs=[(third, epoch)]) == [True]
    assert await used(shard) == (0, 1, 2, 0, 36, 6)


async def test_a_client_that_names_18_keys_counts_as_well(shard):
    """As the protocol had them before there was usage."""
    job_id = await shard.enqueue()
    record = await shard.scripts.job(job_id)
    own = [f"{KEYS.prefix}{kind}:{job_id}" for kind in ("job", "in", "ids", "out")]
    own += [KEYS.log(job_id), KEYS.wake(job_id), KEYS.job(job_id)]
    head = (
        *("lease", "deadline", "delayed", "load", "lanes", "done"),
        "bell",
        "resume",
    )
    keys = [KEYS.prefix + name for name in head]
    keys += [KEYS.job(job_id)] * 2 + [record["entry_key"], *own]
    assert len(keys) == 18
    args = [job_id, "", record["entry_key"], *ending_of(job_id, "cancelled", USAGE)]
    source = load_script("cancel").source
    assert await shard.client.eval(source, len(keys), *keys, *args) == b"cancelled"
    # And what it says of usage is not believed: nobody ran the job.
    assert await used(shard) == (0, 0, 1, 0, 0, 0)


@pytest.mark.parametrize("value", ["x y", "-5 nan inf 1e400 2 3", "", "9" * 400])
async def test_a_strangers_value_stops_no_end(shard, value):
    today = int((await shard.client.time())[0]) * 1000 // DAY_MS
    await shard.client.hset(KEYS.usage, f"{today}:default", value)
    job_id, epoch = await shard.run()
    assert await shard.finish(job_id, epoch, usage=USAGE) == "recorded"
    assert (await used(shard))[0] >= 0
    await shard.client.delete(KEYS.usage)
    await shard.client.set(KEYS.usage, value)
    job_id, epoch = await shard.run()
    assert await shard.finish(job_id, epoch, usage=USAGE) == "recorded"
    assert await shard.state(job_id) == "succeeded"
    assert await remove_old_usage(shard.client, KEYS, 1) == {"usage": 0}


async def test_the_janitor_removes_days_that_are_over_long_ago(shard):
    today = int((await shard.client.time())[0]) * 1000 // DAY_MS
    fields = {f"{today - back}:t{i}": "1" for back in (0, 1, 9, 10, 99) for i in (1, 2)}
    await shard.client.hset(KEYS.usage, mapping={**fields, "odd": "stays"})
    assert await remove_old_usage(shard.client, KEYS, 10) == {"usage": 4}
    left = {name.decode() for name in await shard.client.hkeys(KEYS.usage)}
    kept = {f"{today - back}:t{i}" for back in (0, 1, 9) for i in (1, 2)}
    assert left == {*kept, "odd"}


def fill(url):
    """Usage of three days, two tenants, two models and two partitions; today."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
        today = client.time()[0] * 1000 // DAY_MS
        for model, partition in (("a", 0), ("a", 1), ("b", 0)):
            keys = Keys(model, partition)
            client.sadd(SHARDS, keys.shard)
            for back in range(3):
                client.hset(keys.usage, f"{today - back}:acme", f"2 1 0 0 {back} 7")
            client.hset(keys.usage, f"{today}:other", "0 0 3 1 0 0")
        client.sadd(SHARDS, "c:0")
        client.set(Keys("c", 0).usage, "a stranger's")
    return today


async def test_the_client_sums_partitions_and_keeps_tenants_apart(newest_redis):
    today = fill(newest_redis.url)
    async with Client(newest_redis.url) as mill:
        rows = await mill.usage(days=2)
        assert [(row.day, row.tenant, row.model) for row in rows] == [
            (date_of(today), "acme", "a"),
            (date_of(today), "acme", "b"),
            (date_of(today), "other", "a"),
            (date_of(today), "other", "b"),
            (date_of(today - 1), "acme", "a"),
            (date_of(today - 1), "acme", "b"),
        ]
        first = rows[0]
        assert (first.succeeded, first.failed, first.jobs) == (4, 2, 6)
        assert (rows[4].prompt_tokens, rows[4].completion_tokens) == (2, 14)
        mine = await mill.usage("acme", days=3)
        assert {row.tenant for row in mine} == {"acme"}
        assert len(mine) == 6
        assert await mill.usage("nobody") == []
        for tenant, days in ((None, 0), (None, 10**6), ("a b", 1)):
            with pytest.raises(InvalidRequest):
                await mill.usage(tenant, days)


def test_the_sync_client_and_the_command_say_the_same(newest_redis):
    today = fill(newest_redis.url)
    with SyncClient(newest_redis.url) as mill:
        rows = mill.usage("acme", 1)
    runner = CliRunner()
    url = ["--url", newest_redis.url]
    told = runner.invoke(build_app(), ["usage", "--days", "1", *url])
    assert told.exit_code == 0, told.output
    lines = [line.split() for line in told.output.splitlines()]
    assert lines[1] == [date_of(today), "acme", "a", "6", "2", "0", "0", "0", "14"]
    assert lines[-1] == ["total", "21", "3", "9", "3", "0", "21"]
    as_json = runner.invoke(
        build_app(), ["usage", "--days", "1", "--tenant", "acme", "--json", *url]
    )
    found = [json.loads(line) for line in as_json.output.splitlines()]
    assert [row["succeeded"] for row in found] == [row.succeeded for row in rows]
    none = runner.invoke(build_app(), ["usage", "--tenant", "nobody", *url])
    assert none.exit_code == 0


async def test_the_same_job_enqueued_twice_is_used_once(shard):
    job = new_job()
    await shard.scripts.enqueue([job, job])
    epoch = await shard.run_again(str(job.id))
    await shard.finish(str(job.id), epoch, usage=USAGE)
    assert await used(shard) == (1, 0, 0, 0, 12, 5)
