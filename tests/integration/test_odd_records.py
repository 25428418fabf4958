"""Records that are not in our format: named, and no trouble for the others."""

import json

import pytest
from support.commands import CommandPool
from support.fake_group import FakeGroup

from tokenmill import Client
from tokenmill.shared.errors import ProtocolError
from tokenmill.shared.keys import SHARDS, new_unique
from tokenmill.shared.messages import DEFAULT_MODEL


@pytest.fixture
async def group(redis_client):
    async with FakeGroup(redis_client) as fake:
        yield fake


@pytest.fixture
async def mill(redis_server, group):
    async with Client(redis_server.url, patience_s=5) as client:
        yield client


async def odd_jobs(mill, group) -> dict[str, str]:
    """Four jobs of which three are odd: what is wrong -> id."""
    redis, keys = group.redis, group.keys
    await group.pause()
    names = {"good": (await mill.submit("good")).id}
    names["number"] = (await mill.submit("x")).id
    await redis.hset(keys.job(names["number"]), "finished_ms", "late")
    names["type"] = f"{DEFAULT_MODEL}.0.{new_unique()}"
    await redis.set(keys.job(names["type"]), "a string")
    names["id"] = "no\nid"
    newest = (await redis.zrevrange(keys.recent, 0, 0, withscores=True))[0][1]
    await redis.zadd(keys.recent, {names["type"]: newest + 1, names["id"]: newest + 2})
    await redis.sadd(SHARDS, "no shard", b"\xff:0")
    return names


async def test_a_list_of_jobs_marks_odd_records_and_goes_on(mill, group) -> None:
    names = await odd_jobs(mill, group)
    found = {info.id: info for info in await mill.jobs()}
    assert set(found) == set(names.values())
    assert found[names["good"]].state == "queued"
    assert found[names["good"]].problem is None
    problems = {what: found[i].problem for what, i in names.items() if what != "good"}
    assert {found[names[what]].state for what in problems} == {"unreadable"}
    assert "'finished_ms' is 'late', expected a number" in problems["number"]
    assert "another type" in problems["type"]
    assert "cannot be a job id" in problems["id"]
    assert [info.id for info in await mill.jobs(state="queued")] == [names["good"]]


async def test_the_commands_name_what_is_wrong(mill, group, redis_server) -> None:
    names = await odd_jobs(mill, group)
    pool = CommandPool(redis_server.url, group)
    code, out, err = await pool.run("jobs")
    assert code == 0
    assert names["good"] in out
    assert len(out.splitlines()) == 5
    assert "expected a number" in err
    code, out, _ = await pool.run("jobs", "--json")
    assert code == 0
    assert len([json.loads(line) for line in out.splitlines()]) == 4
    for what, words in (
        ("number", "'finished_ms' is 'late'"),
        ("type", "another type"),
    ):
        code, _, err = await pool.run("show", names[what])
        assert code == 13
        assert words in err


async def test_completion_goes_on_past_an_odd_record(mill, group) -> None:
    names = await odd_jobs(mill, group)
    unreadable = (await mill.submit("y")).id
    await group.redis.set(group.keys.output(unreadable), "{")
    listed = (await mill.submit("z")).id
    await group.redis.lpush(group.keys.output(listed), "a list")
    odd = {names["type"], unreadable, listed}
    group.serving.set()
    ended = {}
    async for job in mill.as_completed([names["good"], *odd]):
        ended[job.id] = job
    assert (await ended[names["good"]].result()).text == "good"
    for name in odd:
        with pytest.raises(ProtocolError):
            await ended[name].result()


async def test_waiting_for_an_odd_record_is_an_error(mill, group) -> None:
    names = await odd_jobs(mill, group)
    job = mill.job(names["type"])
    with pytest.raises(ProtocolError, match="another type"):
        await job.result(60)
    with pytest.raises(ProtocolError, match="another type"):
        await anext(job.stream())
