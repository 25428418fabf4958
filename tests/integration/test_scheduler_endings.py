"""Jobs that no worker ends: their log line, and those that nobody can start."""

import pytest
import redis.asyncio
from structlog.testing import capture_logs
from support.scheduled_pool import KEYS, Pool, new_job, scheduling
from support.shard_client import HOUR_MS, Shard
from support.waiting import wait_until

from tokenmill.scheduler.endings import EndLog
from tokenmill.scheduler.housekeeping import mend_orphans
from tokenmill.shared.scripts import StartItem
from tokenmill.shared.scripts_reap import MAX_START_LOSSES

FIELDS = {
    *(
        "job",
        "model",
        "version",
        "job_class",
        "tenant",
        "bucket",
        "state",
        "prompt_tokens",
    ),
    *("output_tokens", "queued_ms", "ttft_ms", "total_ms", "finish_reasons"),
    *("error", "epoch"),
}


@pytest.fixture
async def shard(redis_client: "redis.asyncio.Redis"):
    return await Shard(redis_client).open("g1")


async def lines_of(log: EndLog) -> dict[str, dict[str, object]]:
    with capture_logs() as logs:
        while await log.step():
            pass
    lines = [line for line in logs if line["event"] == "job"]
    found = {str(line["job"]): dict(line) for line in lines}
    assert len(found) == len(lines)
    return found


async def test_every_job_without_a_worker_gets_one_line(shard):
    log = EndLog(shard.client, KEYS)
    by_worker, epoch = await shard.run()
    await shard.finish(by_worker, epoch)
    waiting = await shard.enqueue()
    assert await shard.scripts.cancel(waiting) == "cancelled"
    late = await shard.enqueue(deadline_ms=HOUR_MS)
    await shard.overdue(KEYS.deadline, late)
    running, _ = await shard.run(deadline_ms=HOUR_MS)
    await shard.overdue(KEYS.deadline, running)
    await shard.open("g2")
    lost, _ = await shard.run("g2", alone=True)
    await shard.overdue(KEYS.lease, lost)
    await shard.reap()
    faulty, epoch = await shard.run()  # its worker logs what it gives up itself
    assert await shard.fail(faulty, epoch, max_attempts=1) == "failed"
    handed, epoch = await shard.run()
    assert await shard.scripts.cancel(handed) == "cancelling"
    await shard.scripts.release(group="g1", jobs=[(handed, epoch)])
    lines = await lines_of(log)
    assert {job: (line["state"], line["error"]) for job, line in lines.items()} == {
        waiting: ("cancelled", "cancelled"),
        late: ("expired", "expired"),
        running: ("expired", "expired"),
        lost: ("failed", "lease_lost"),
        handed: ("cancelled", "cancelled"),
    }
    for line in lines.values():
        assert line.keys() - {"event", "log_level"} == FIELDS
        assert line["total_ms"] >= 0
    assert lines[running]["queued_ms"] >= 0
    assert lines[running]["prompt_tokens"] == 12
    assert lines[waiting]["queued_ms"] is None


async def test_the_next_scheduler_goes_on_where_the_last_one_stopped(shard):
    first = await shard.enqueue()
    await shard.scripts.cancel(first)
    assert set(await lines_of(EndLog(shard.client, KEYS))) == {first}
    second = await shard.enqueue()
    await shard.scripts.cancel(second)
    assert set(await lines_of(EndLog(shard.client, KEYS))) == {second}


async def test_the_active_scheduler_logs_a_refused_job(
    redis_client: "redis.asyncio.Redis",
):
    pool = Pool(redis_client)
    with capture_logs() as logs:
        async with scheduling(redis_client):
            await pool.card()
            [job_id] = await pool.enqueue(new_job("x" * 500))
            result = await pool.result(job_id)
            await wait_until(lambda: any(x["event"] == "job" for x in logs))
    [line] = [line for line in logs if line["event"] == "job"]
    assert (line["job"], line["state"]) == (job_id, "failed")
    assert line["error"] == "prompt_too_long"
    assert result.error is not None
    assert result.error.message == (
        "text: the prompt has 500 tokens; the model holds 200 tokens of prompt and "
        "output: shorten the prompt to at most 199 tokens"
    )


async def test_a_damaged_event_or_record_stops_no_other_line(shard):
    await shard.client.xadd(KEYS.done, {"id": b"\xff", "owner": ""})
    damaged = await shard.enqueue()
    await shard.scripts.cancel(damaged)
    await shard.client.set(KEYS.output(damaged), "{")
    sound = await shard.enqueue()
    await shard.scripts.cancel(sound)
    assert sound in await lines_of(EndLog(shard.client, KEYS))


async def test_a_job_that_living_groups_cannot_start_is_given_up(shard):
    job_id = await shard.enqueue()
    await shard.client.set(KEYS.log(job_id), "a stranger's")
    for turn in range(1, MAX_START_LOSSES + 1):
        record = await shard.scripts.job(job_id)
        reply = await shard.dispatch(job_id, entry_key=record["entry_key"])
        assert reply.status == "dispatched"
        assert (await shard.start(job_id, reply.epoch)).status == "lost"
        await shard.overdue(KEYS.lease, job_id)
        report = await shard.reap()
        last = turn == MAX_START_LOSSES
        assert (report.redelivered, report.dead) == ((0, 1) if last else (1, 0))
    assert report.dead_jobs[0].reason == "start_losses"
    assert await shard.state(job_id) == "failed"
    assert (await shard.result(job_id))["error"]["code"] == "start_lost"
    [(_, letter)] = await shard.client.xrange(KEYS.dead)
    assert (letter[b"id"].decode(), letter[b"reason"]) == (job_id, b"start_losses")
    (group,) = await shard.scripts.groups()
    assert group.credit_running == group.max_running
    assert "jobs" not in await shard.scripts.load()


async def test_groups_that_die_before_the_start_cost_nothing(shard):
    job_id = await shard.enqueue()
    for _ in range(2 * MAX_START_LOSSES):
        await shard.open("g1")
        record = await shard.scripts.job(job_id)
        reply = await shard.dispatch(job_id, entry_key=record["entry_key"])
        assert reply.status == "dispatched"
        await shard.scripts.forfeit("g1")
        assert (await shard.reap()).redelivered == 1
    assert (await shard.scripts.job(job_id)).get("start_losses") is None


async def test_a_start_forgives_earlier_losses(shard):
    job_id = await shard.enqueue()
    for turn in range(2):
        record = await shard.scripts.job(job_id)
        reply = await shard.dispatch(job_id, entry_key=record["entry_key"])
        if turn == 0:
            await shard.overdue(KEYS.lease, job_id)
            await shard.reap()
            assert (await shard.scripts.job(job_id))["start_losses"] == "1"
    await shard.start(job_id, reply.epoch)
    assert "start_losses" not in await shard.scripts.job(job_id)


async def test_the_scheduler_warns_of_a_job_that_it_gives_up(
    redis_client: "redis.asyncio.Redis",
):
    pool = Pool(redis_client)
    [job_id] = await pool.enqueue(new_job("hello"))
    await redis_client.set(KEYS.log(job_id), "a stranger's")
    with capture_logs() as logs:
        async with scheduling(redis_client):
            await pool.group()
            for _ in range(MAX_START_LOSSES):
                [started] = await pool.work(1)
                assert started.status == "lost"
                await redis_client.zadd(KEYS.lease, {job_id: 1}, xx=True)
            await pool.result(job_id)
            await wait_until(lambda: any(x["event"] == "job_given_up" for x in logs))
    [line] = [line for line in logs if line["event"] == "job_given_up"]
    assert (line["log_level"], line["start_losses"]) == ("warning", MAX_START_LOSSES)


@pytest.mark.parametrize(
    "damage",
    [{"tokens": "1e999"}, {"keep_ms": "inf"}, {"priority": "x"}, {"epoch": "x"}],
)
async def test_an_orphan_with_a_damaged_record_ends_or_runs(
    redis_client: "redis.asyncio.Redis", damage: dict[str, str]
):
    pool = Pool(redis_client)
    [job_id] = await pool.enqueue(new_job("hello"))
    record = await pool.scripts.job(job_id)
    assert record is not None
    await redis_client.xdel(record["entry_key"], record["entry"])
    await redis_client.hset(KEYS.job(job_id), mapping=damage)  # type: ignore[misc]
    assert await mend_orphans(redis_client, KEYS) == {"queued": 1}
    async with scheduling(redis_client):
        await pool.group()

        async def settled() -> bool:
            return await pool.state(job_id) in ("dispatched", "failed")

        await wait_until(settled, what="an end or a dispatch")
    assert await mend_orphans(redis_client, KEYS) == {}


@pytest.mark.parametrize("name", ["input", "ids"])
async def test_a_strangers_key_keeps_only_its_own_job_from_starting(shard, name: str):
    odd, sound = await shard.enqueue(), await shard.enqueue()
    items = []
    for job_id in (odd, sound):
        reply = await shard.dispatch(job_id)
        items.append(StartItem(job_id, reply.epoch, ""))
    key = getattr(KEYS, name)(odd)
    await shard.client.delete(key)
    await shard.client.rpush(key, "x")
    started = await shard.scripts.start(group="g1", lease_ms=HOUR_MS, items=items)
    assert [s.status for s in started] == ["lost", "started"]


@pytest.mark.parametrize("name", ["dead", "done"])
async def test_a_strangers_key_in_place_of_a_log_keeps_no_job_from_ending(
    shard, name: str
):
    await shard.client.set(getattr(KEYS, name), "x")
    job_id, _ = await shard.run(alone=True)
    await shard.overdue(KEYS.lease, job_id)
    assert (await shard.reap()).dead == 1
    assert await shard.state(job_id) == "failed"
