"""Dead letters: kept whole, shown, run again as one new job, purged."""

import asyncio
import json

import pytest
import typer
from support.commands import CommandPool
from support.fake_group import FakeGroup
from support.leaks import leaked_keys
from support.shard_client import HOUR_MS, KEYS, Shard
from typer.testing import CliRunner

from tokenmill import Client, SyncClient
from tokenmill.producer.cli_dead import register_dead
from tokenmill.producer.dead import DeadLetters
from tokenmill.producer.submit import Submission
from tokenmill.scheduler.housekeeping import trim
from tokenmill.shared.errors import InvalidRequest, QueueFull, UnknownJob
from tokenmill.shared.keys import Keys
from tokenmill.shared.redis import connect
from tokenmill.shared.script_types import Limits

DAY_MS = 24 * HOUR_MS
ALWAYS = {
    "job_class": "bulk",
    "tenant": "acme",
    "priority": -7,
    "seed": 99,
    "max_tokens": 31,
    "payload": b'{"text":"hi","sampling":{"temperature":0.5}}',
    "payload_hash": "h" * 32,
}


@pytest.fixture
async def shard(redis_client):
    return await Shard(redis_client).open("g1")


@pytest.fixture
async def mill(redis_server, shard):
    async with Client(redis_server.url) as client:
        yield client


async def bury(shard: Shard, **changes) -> str:
    """A job that was given up: its attempts are used up."""
    fields = ALWAYS | {"idempotency_key": "once"} | changes
    job_id = await shard.enqueue(**fields)
    epoch = await shard.run_again(job_id)
    assert await shard.fail(job_id, epoch, max_attempts=1) == "failed"
    return job_id


async def lifetimes(shard: Shard, job_id: str) -> dict[str, int]:
    names = ("job", "input", "output", "log", "ids")
    return {n: await shard.client.pttl(getattr(KEYS, n)(job_id)) for n in names}


# --- kept whole ------------------------------------------------------------
async def test_what_is_needed_to_run_again_stays_as_long_as_the_letter(shard):
    job_id = await bury(shard)
    left = await lifetimes(shard, job_id)
    assert all(left[name] > 6 * DAY_MS for name in ("job", "input", "output"))
    assert all(0 < left[name] <= HOUR_MS for name in ("log", "ids"))
    idem = await shard.client.pttl(KEYS.idempotency("acme", "once"))
    assert 0 < idem <= HOUR_MS
    assert await leaked_keys(shard.client) == []


@pytest.mark.parametrize("end", ["bad input", "retried and done", "cancelled"])
async def test_other_ends_are_no_dead_letters(shard, mill, end):
    job_id, epoch = await shard.run()
    if end == "bad input":
        await shard.finish(job_id, epoch, state="failed")
    elif end == "cancelled":
        await shard.scripts.cancel(job_id)
        assert await shard.fail(job_id, epoch, max_attempts=1) == "cancelled"
    else:
        assert await shard.fail(job_id, epoch) == "retrying"
        await shard.overdue(KEYS.delayed, job_id)
        await shard.reap()
        epoch = await shard.run_again(job_id)
        assert await shard.finish(job_id, epoch) == "recorded"
    assert await mill.dead_letters() == []
    assert (await lifetimes(shard, job_id))["job"] <= HOUR_MS


# --- requeue ------------------------------------------------------------
async def test_a_dead_job_runs_again_as_a_new_one(shard, mill):
    dead = await bury(shard)
    (made,) = await mill.requeue(dead)
    assert made.job is not None
    assert made.job != dead
    new, old = await shard.scripts.job(made.job), await shard.scripts.job(dead)
    assert new["state"] == "queued"
    for field in ("class", "tenant", "priority", "seed", "max_tokens", "hash"):
        assert new[field] == old[field], field
    for field in ("attempts", "lease_losses", "idem", "deadline"):
        assert new.get(field, "") == "", field
    assert await shard.client.get(KEYS.input(made.job)) == ALWAYS["payload"]
    assert old["state"] == "failed"
    assert (await shard.result(dead))["state"] == "failed"
    (letter,) = await mill.dead_letters()
    assert letter.requeued_as == made.job
    epoch = await shard.run_again(made.job)
    assert await shard.finish(made.job, epoch) == "recorded"


async def test_a_letter_becomes_one_job_however_often_it_is_requeued(shard, mill):
    dead = await bury(shard)
    clients = [DeadLetters(mill._session) for _ in range(4)]
    made = await asyncio.gather(*(client.requeue(dead) for client in clients))
    made += [await mill.requeue(dead), await mill.requeue([dead, dead])]
    assert {one.job for (one,) in made} == {made[0][0].job}
    assert (await shard.scripts.load())["jobs"] == "1"


async def test_a_requeue_that_died_before_its_mark_makes_no_second_job(shard, mill):
    dead = await bury(shard)
    (made,) = await mill.requeue(dead)
    await shard.client.hdel(KEYS.job(dead), "requeued_as")
    (again,) = await mill.requeue(dead)
    assert again == made
    assert (await shard.scripts.load())["jobs"] == "1"
    assert (await shard.scripts.job(dead))["requeued_as"] == made.job


async def test_one_letter_that_cannot_run_again_stops_no_other(shard, mill):
    good, damaged, gone = [await bury(shard, idempotency_key=None) for _ in range(3)]
    await shard.client.hdel(KEYS.job(damaged), "hash")
    await shard.client.delete(KEYS.input(gone))
    await shard.client.xadd(KEYS.resume, {"id": "nonsense"}, id="5-1")
    await shard.scripts.dead_letter(
        entry_key=KEYS.resume, entry_id="5-1", reason="no such job"
    )
    made = {one.id: one for one in await mill.requeue(None)}
    assert made[good].job is not None
    assert "damaged" in made[damaged].problem
    assert "expired" in made[gone].problem
    (stranger,) = set(made) - {good, damaged, gone}
    assert "no job" in made[stranger].problem
    (shown,) = await mill.dead_letters(stranger)
    assert (shown.job, shown.error.code) == (None, "protocol_error")


async def test_a_full_queue_stops_a_requeue_and_it_can_go_on_later(shard, mill):
    letters = [await bury(shard, idempotency_key=None) for _ in range(3)]
    await shard.scripts.write_limits(Limits(max_waiting_jobs=3))  # two of bulk
    with pytest.raises(QueueFull):
        await mill.requeue(None)
    marked = [one.requeued_as for one in await mill.dead_letters()]
    assert sum(mark is not None for mark in marked) == 2
    await shard.scripts.write_limits(Limits())
    assert len(await mill.requeue(letters)) == 3
    assert (await shard.scripts.load())["jobs"] == "3"


# --- purge ------------------------------------------------------------
async def test_a_purged_letters_record_goes_when_others_do(shard, mill):
    dead, other = [await bury(shard, idempotency_key=None) for _ in range(2)]
    assert await mill.purge(dead) == 1
    left = await lifetimes(shard, dead)
    assert all(0 < left[name] <= HOUR_MS for name in left)
    assert (await lifetimes(shard, other))["job"] > DAY_MS
    assert [one.id for one in await mill.dead_letters()] == [other]
    with pytest.raises(UnknownJob, match="no dead letter"):
        await mill.purge([dead, other])
    assert await mill.purge(None) == 1


async def test_what_is_past_its_time_goes_with_the_letter_at_once(shard, mill):
    dead = await bury(shard)
    await shard.client.hset(KEYS.job(dead), "finished_ms", "1000")
    assert await mill.purge(None, older_than_ms=DAY_MS) == 0
    assert await mill.purge(None, older_than_ms=0) == 1
    left = await lifetimes(shard, dead)
    assert [left[name] for name in ("job", "input", "output")] == [-2, -2, -2]


async def test_the_janitor_lets_go_of_what_old_letters_kept(shard, mill):
    dead = await bury(shard)
    assert (await trim(shard.client, KEYS, HOUR_MS))["dead_letters"] == 0
    assert (await trim(shard.client, KEYS, -1))["dead_letters"] == 1
    assert (await lifetimes(shard, dead))["input"] <= HOUR_MS
    assert await mill.dead_letters() == []


async def test_a_strangers_key_hides_no_other_shards_letters(shard, mill):
    other = Keys("other", 0)
    await shard.client.sadd("tm:shards", other.shard, "not a shard")
    await shard.client.set(other.dead, "x")
    dead = await bury(shard)
    assert [one.id for one in await mill.dead_letters()] == [dead]


async def test_no_letter_of_that_name(mill):
    with pytest.raises(UnknownJob, match=r"tokenmill dead list"):
        await mill.requeue("tiny.0.0123456789abcdef")
    assert await mill.requeue([]) == []


async def test_the_blocking_client_does_the_same(shard, redis_server):
    dead = await bury(shard)

    def work() -> tuple[str, int]:
        with SyncClient(redis_server.url) as mill:
            (letter,) = mill.dead_letters()
            (made,) = mill.requeue(letter.id)
            assert made.job is not None
            return letter.id, mill.purge(None)

    assert await asyncio.to_thread(work) == (dead, 1)


async def test_a_page_that_finds_no_room_says_so_whatever_else_is_wrong(
    shard, mill, monkeypatch
):
    for _ in range(2):
        await bury(shard, idempotency_key=None)
    full = QueueFull("max_waiting_jobs: full", 1.0, "max_waiting_jobs")
    other = InvalidRequest("tenant", "is odd")

    async def refuse(self, jobs):
        other.enqueued, other.refused = (), {0: other, 1: full}
        raise other

    monkeypatch.setattr(Submission, "enqueue", refuse)
    with pytest.raises(QueueFull) as caught:
        await mill.requeue(None)
    assert caught.value.refused == {0: other, 1: full}


# --- the command ------------------------------------------------------------
async def test_the_command_lists_shows_requeues_and_purges(newest_redis):
    connection = connect(newest_redis.url)
    await connection.flushall()
    shard = await Shard(connection).open("g1")
    pool = CommandPool(newest_redis.url, FakeGroup(connection))
    dead = await bury(shard)
    code, out, _ = await pool.run("dead", "list")
    (header, row) = out.splitlines()
    assert (code, header.split()[:2]) == (0, ["ID", "REASON"])
    assert row.split()[:4] == [dead, "attempts", "bulk", "acme"]
    code, out, _ = await pool.run("dead", "requeue", dead, "--json")
    new = json.loads(out)
    assert (code, new["id"]) == (0, dead)
    code, out, _ = await pool.run("dead", "show", dead)
    assert code == 0
    assert "[engine_error] boom" in out
    assert new["job"] in out
    assert (await pool.run("dead", "requeue", "--all"))[
        1
    ] == f"{dead} -> {new['job']}\n"
    assert (await pool.run("dead", "purge", "--older-than", "0s", "--json"))[1] == (
        '{"purged":1}\n'
    )
    code, _, err = await pool.run("dead", "requeue", dead)
    assert (code, "no dead letter" in err) == (8, True)
    await connection.aclose()


@pytest.mark.parametrize(
    "words", [["requeue"], ["purge", "--all", "x"], ["purge", "--older-than", "1y"]]
)
def test_wrong_usage_of_the_command(words):
    app = typer.Typer()
    register_dead(app)
    ended = CliRunner().invoke(app, ["dead", *words])
    assert (ended.exit_code, "Invalid value" in ended.output) == (2, True)
