"""Suspects and poison jobs: which lost leases count, and what is said of them."""

import json

import pytest
from support.leaks import leaked_keys
from support.shard_client import HOUR_MS, KEYS, Shard

from tokenmill.shared.losses import process_ended, step_stuck


@pytest.fixture
async def shard(redis_client):
    return await Shard(redis_client).open("g1", "g2")


async def lose(shard: Shard, *job_ids: str) -> None:
    for job_id in job_ids:
        await shard.overdue(KEYS.lease, job_id)
    await shard.reap()


async def losses_of(shard: Shard, job_id: str) -> tuple[int, int]:
    record = await shard.scripts.job(job_id)
    return int(record.get("lease_losses", 0)), int(record.get("alone_losses", 0))


async def test_a_job_in_company_is_never_a_dead_letter_however_often(shard):
    job_id, _ = await shard.run()
    for number in range(1, 8):
        await lose(shard, job_id)
        assert await losses_of(shard, job_id) == (number, 0)
        ((_, entry),) = await shard.client.xrange(KEYS.resume)
        assert entry[b"losses"] == str(number).encode()
        await shard.run_again(job_id)
    assert await shard.client.xlen(KEYS.dead) == 0


async def test_a_job_that_takes_its_worker_along_while_alone_is_a_dead_letter(shard):
    poison, _ = await shard.run()
    for _ in range(2):
        await lose(shard, poison)
        await shard.run_again(poison, alone=await losses_of(shard, poison) == (2, 0))
    await lose(shard, poison)
    assert await shard.state(poison) == "failed"
    assert await losses_of(shard, poison) == (3, 1)
    error = (await shard.result(poison))["error"]
    assert error["code"] == "lease_lost"
    assert "3 workers were lost" in error["message"]
    assert "1 of them while it ran alone" in error["message"]
    ((_, letter),) = await shard.client.xrange(KEYS.dead)
    assert letter[b"id"].decode() == poison
    assert json.loads(letter[b"error"]) == error
    record = await shard.scripts.job(poison)
    assert json.loads(record["last_error"]) == error
    assert [g.credit_blocks for g in await shard.scripts.groups()] == [1000, 1000]
    assert [g.alone for g in await shard.scripts.groups()] == ["", ""]
    assert await leaked_keys(shard.client) == []


async def test_as_many_losses_alone_as_the_settings_allow(shard):
    job_id, _ = await shard.run(alone=True)
    await shard.overdue(KEYS.lease, job_id)
    assert (await shard.reap(max_losses_alone=2)).redelivered == 1
    await shard.run_again(job_id, alone=True)
    await shard.overdue(KEYS.lease, job_id)
    assert (await shard.reap(max_losses_alone=2)).dead == 1


async def test_neighbours_of_a_poison_job_all_finish(shard):
    """Every group that has the poison job loses its lease; suspects run one by one."""
    poison, *others = [(await shard.run())[0] for _ in range(5)]
    for _ in range(2):
        await lose(shard, poison, *others)
        losses = [await losses_of(shard, job) for job in (poison, *others)]
        assert losses == [losses[0]] * 5
        if losses[0] == (1, 0):
            for job in (poison, *others):
                await shard.run_again(job)
    await shard.run_again(poison, alone=True)
    assert (await shard.dispatch(others[0], entry_key=KEYS.resume)).status == (
        "no_credit"
    )
    epochs = {}
    for job in others:
        # Meanwhile the other group has them, one after the other.
        epochs[job] = await shard.run_again(job, "g2", alone=True)
        assert await shard.finish(job, epochs[job], group="g2") == "recorded"
    await lose(shard, poison)
    assert await shard.state(poison) == "failed"
    assert {await shard.state(job) for job in others} == {"succeeded"}
    letters = await shard.client.xrange(KEYS.dead)
    assert [fields[b"id"].decode() for _, fields in letters] == [poison]


# --- alone -------------------------------------------------------------------------
async def test_alone_needs_an_empty_group_and_keeps_others_out(shard):
    neighbour, _ = await shard.run()
    suspect, other = [await shard.enqueue() for _ in range(2)]
    assert (await shard.dispatch(suspect, alone=True)).status == "no_credit"
    assert await shard.finish(neighbour, 1) == "recorded"
    reply = await shard.dispatch(suspect, alone=True)
    assert reply.status == "dispatched"
    (group, _) = await shard.scripts.groups()
    assert group.alone == suspect
    for _ in range(2):  # promised only, then running
        assert (await shard.dispatch(other)).status == "no_credit"
        assert (await shard.dispatch(other, alone=True)).status == "no_credit"
        await shard.start(suspect, reply.epoch)
    assert await shard.finish(suspect, reply.epoch) == "recorded"
    assert (await shard.dispatch(other)).status == "dispatched"


@pytest.mark.parametrize("way", ["release", "cancel", "fail", "expire", "lease"])
async def test_the_group_is_free_again_however_the_job_left(shard, way):
    job_id, epoch = await shard.run(alone=True, deadline_ms=HOUR_MS)
    if way == "release":
        await shard.scripts.release(group="g1", jobs=[(job_id, epoch)])
    elif way == "cancel":
        await shard.scripts.cancel(job_id)
        await shard.finish(job_id, epoch, state="cancelled")
    elif way == "fail":
        await shard.fail(job_id, epoch)
    elif way == "expire":
        await shard.overdue(KEYS.deadline, job_id)
        await shard.reap()
    else:
        await shard.overdue(KEYS.lease, job_id)
        await shard.reap(max_losses_alone=2)
    group = (await shard.scripts.groups())[0]
    assert (group.alone, group.credit_running) == ("", group.max_running)
    assert (await shard.dispatch(await shard.enqueue())).status == "dispatched"


async def test_a_group_that_comes_back_still_has_its_job_alone(shard):
    job_id, _ = await shard.run(alone=True)
    await shard.client.delete(KEYS.group("g1"))
    await shard.open("g1")
    groups = {group.group: group.alone for group in await shard.scripts.groups()}
    assert groups == {"g1": job_id, "g2": ""}
    assert (await shard.dispatch(await shard.enqueue())).status == "no_credit"


# --- what is no loss ---------------------------------------------------------------
@pytest.mark.parametrize("way", ["release", "draining", "stopped", "before_start"])
async def test_a_worker_that_merely_goes_costs_a_job_alone_nothing(shard, way):
    job_id = await shard.enqueue()
    if way == "before_start":
        await shard.dispatch(job_id, alone=True)
    else:
        epoch = await shard.run_again(job_id, alone=True)
    if way == "release":
        assert await shard.scripts.release(group="g1", jobs=[(job_id, epoch)]) == [True]
    elif way == "draining":
        await shard.client.hset(KEYS.group("g1"), "state", "draining")
        await shard.overdue(KEYS.lease, job_id)
    elif way == "stopped":
        await shard.scripts.forfeit("g1", "someone stopped it", counts=False)
    else:
        await shard.scripts.forfeit("g1", process_ended(-9))
    await shard.reap()
    assert await shard.state(job_id) == "queued"
    assert await losses_of(shard, job_id) == (0, 0)
    assert "lost" not in await shard.scripts.job(job_id)


async def test_a_forfeit_while_draining_is_no_loss(shard):
    job_id, _ = await shard.run(alone=True)
    await shard.client.hset(KEYS.group("g1"), "state", "draining")
    assert await shard.scripts.forfeit("g1", process_ended(-9)) == 1
    assert (await shard.reap()).redelivered == 1
    assert await losses_of(shard, job_id) == (0, 0)


# --- causes --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (step_stuck(120.0), "worker.step_timeout_s=120 s"),
        (process_ended(-9), "SIGKILL"),
        (process_ended(-11), "SIGSEGV, a fault in native code"),
        (process_ended(3), "exit code 3"),
        ("", "its lease ran out"),
    ],
)
async def test_the_cause_is_told_with_the_job_and_with_its_end(shard, cause, words):
    in_company, _ = await shard.run("g1")
    alone, _ = await shard.run("g2", alone=True)
    await shard.scripts.forfeit("g1", cause)
    await shard.scripts.forfeit("g2", cause)
    report = await shard.reap()
    assert (report.redelivered, report.dead) == (1, 1)
    record = await shard.scripts.job(in_company)
    assert words in json.loads(record["last_error"])["message"]
    assert words in (await shard.result(alone))["error"]["message"]


async def test_who_reported_first_knew_most_and_only_of_that_run(shard):
    job_id, _ = await shard.run("g1")
    await shard.scripts.forfeit("g1", step_stuck(5.0))
    # The supervisor saw no more than that the process ended.
    await shard.scripts.forfeit("g1", process_ended(3), counts=False)
    await shard.reap()
    assert await losses_of(shard, job_id) == (1, 0)
    record = await shard.scripts.job(job_id)
    assert "step_timeout_s=5 s" in json.loads(record["last_error"])["message"]
    await shard.run_again(job_id, "g2")
    await lose(shard, job_id)
    record = await shard.scripts.job(job_id)
    assert "its lease ran out" in json.loads(record["last_error"])["message"]


async def test_a_cause_of_an_earlier_run_excuses_no_later_one(shard):
    """A stopped worker may have handed its job back just after it was forfeited."""
    job_id, epoch = await shard.run("g1")
    await shard.scripts.forfeit("g1", "someone stopped it", counts=False)
    assert await shard.scripts.release(group="g1", jobs=[(job_id, epoch)]) == [True]
    await shard.run_again(job_id, "g2", alone=True)
    await lose(shard, job_id)
    assert await shard.state(job_id) == "failed"
