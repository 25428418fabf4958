"""A worker that was taken for dead and is not: nothing that it sends has an effect."""

import pytest
from support.shard_client import HOUR_MS, KEYS, Shard
from support.shard_truth import ShardTruth


@pytest.fixture
async def shard(redis_client):
    return await Shard(redis_client).open("zombie", "other")


async def send(shard: Shard, call: str, job_id: str, epoch: int) -> object:
    """Sends one thing as the zombie."""
    scripts, mine = shard.scripts, {"group": "zombie"}
    if call == "emit":
        return await shard.emit(job_id, epoch, 7, 2, "zombie")
    if call == "finish":
        return await shard.finish(job_id, epoch, 9, group="zombie")
    if call == "fail":
        return await shard.fail(job_id, epoch, 1, "zombie")
    if call == "start":
        return (await shard.start(job_id, epoch, "zombie")).status
    if call == "release":
        return await scripts.release(**mine, jobs=[(job_id, epoch)])
    return await scripts.renew(**mine, lease_ms=HOUR_MS, jobs=[(job_id, epoch)])


async def snapshot(client) -> dict[bytes, object]:
    """Everything in Redis."""
    return {name: await client.dump(name) for name in await client.keys("tm:*")}


CALLS = ("start", "renew", "emit", "finish", "fail", "release")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("now", ["waits", "runs_elsewhere", "runs_here_again", "ended"])
async def test_nothing_of_a_reaped_owner_has_an_effect(shard, call, now):
    job_id, epoch = await shard.run("zombie")
    assert await shard.emit(job_id, epoch, 1, 0, "zombie") == "written"
    await shard.overdue(KEYS.lease, job_id)
    assert (await shard.reap()).redelivered == 1
    if now != "waits":
        group = "zombie" if now == "runs_here_again" else "other"
        again = await shard.run_again(job_id, group)
        assert await shard.emit(job_id, again, 1, 1, group) == "written"
        if now == "ended":
            assert await shard.finish(job_id, again, group=group) == "recorded"
    before = await snapshot(shard.client)
    assert await send(shard, call, job_id, epoch) in ("lost", ["lost"], [False])
    assert await snapshot(shard.client) == before


@pytest.mark.parametrize("call", CALLS)
async def test_nor_of_an_owner_whose_job_was_given_up(shard, call):
    job_id, epoch = await shard.run("zombie", alone=True)
    await shard.overdue(KEYS.lease, job_id)
    assert (await shard.reap()).dead == 1
    before = await snapshot(shard.client)
    assert await send(shard, call, job_id, epoch) in ("lost", ["lost"], [False])
    assert await snapshot(shard.client) == before


async def test_the_log_is_the_same_as_without_a_zombie(shard, redis_server):
    import redis

    job_id, epoch = await shard.run("zombie")
    for seq in (1, 2):
        await shard.emit(job_id, epoch, seq, seq - 1, "zombie")
    await shard.overdue(KEYS.lease, job_id)
    await shard.reap()
    again = await shard.run_again(job_id, "other")
    for seq in range(1, 4):
        assert await shard.emit(job_id, epoch, seq + 2, seq + 1, "zombie") == "lost"
        assert await shard.emit(job_id, again, seq, seq + 1, "other") == "written"
    assert await shard.finish(job_id, epoch, 99, group="zombie") == "lost"
    assert await shard.finish(job_id, again, 9, group="other") == "recorded"
    told = [d for _, d in await shard.log(job_id) if d and d.get("token_ids")]
    assert [d.get("offset", 0) for d in told] == list(range(5))
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as reader:
        truth = ShardTruth(reader, KEYS)
        truth.states[job_id] = "running"
        truth.check()
