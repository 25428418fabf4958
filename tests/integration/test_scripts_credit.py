"""The books of a group: what is left, and what bulk holds that others may take."""

import pytest
from support.shard_client import HOUR_MS, KEYS, Shard, group_info

from tokenmill.shared.keys import lane_of
from tokenmill.shared.script_types import DispatchItem, GroupInfo

ROOM = {"total_blocks": 10, "max_running": 4, "batch_tokens": 100}


def lane(job_class: str) -> str:
    return KEYS.queue(job_class, "128", lane_of("default"))


@pytest.fixture
async def shard(redis_client):
    return await Shard(redis_client).open("g1", **ROOM)


async def give(shard: Shard, job_class: str, **changes) -> tuple[str, str]:
    job_id = await shard.enqueue(job_class=job_class)
    reply = await shard.dispatch(job_id, entry_key=lane(job_class), **changes)
    return job_id, reply.status


async def books(shard: Shard) -> tuple[tuple[int, ...], tuple[int, ...]]:
    (group,) = await shard.scripts.groups()
    return (
        (group.credit_blocks, group.credit_running, group.credit_tokens),
        (group.bulk_blocks, group.bulk_running, group.bulk_tokens),
    )


async def test_interactive_work_may_take_what_bulk_holds_and_bulk_may_not(shard):
    bulk, status = await give(shard, "bulk", cost_blocks=8, tokens=60)
    assert status == "dispatched"
    assert await books(shard) == ((2, 3, 40), (8, 1, 60))
    assert (await give(shard, "bulk", cost_blocks=3))[1] == "no_credit"
    talk, status = await give(shard, "interactive", cost_blocks=9, tokens=90)
    assert status == "dispatched"
    assert await books(shard) == ((-7, 2, -50), (8, 1, 60))
    # All but one block is interactive now; no bulk can be taken twice.
    assert (await give(shard, "interactive", cost_blocks=2))[1] == "no_credit"
    assert (await give(shard, "interactive", cost_blocks=1, tokens=11))[1] == (
        "no_credit"
    )
    assert (await give(shard, "bulk", cost_blocks=1))[1] == "no_credit"
    assert (await give(shard, "interactive", cost_blocks=1, tokens=10))[1] == (
        "dispatched"
    )
    await shard.start(bulk, 1)
    assert await shard.emit(bulk, 1, 1, 0) == "written"
    assert await books(shard) == ((-8, 1, 0), (8, 1, 0))
    assert await shard.finish(bulk, 1) == "recorded"
    assert await books(shard) == ((0, 2, 0), (0, 0, 0))
    assert await shard.finish(talk, 1, state="failed") == "recorded"
    assert await books(shard) == ((9, 3, 90), (0, 0, 0))


async def test_slots_of_bulk_are_taken_as_well(shard):
    for _ in range(4):
        assert (await give(shard, "bulk", cost_blocks=1))[1] == "dispatched"
    assert (await give(shard, "bulk", cost_blocks=1))[1] == "no_credit"
    for _ in range(4):
        assert (await give(shard, "interactive", cost_blocks=1))[1] == "dispatched"
    assert (await give(shard, "interactive", cost_blocks=1))[1] == "no_credit"
    assert (await books(shard))[0][1] == -4


async def test_one_call_counts_its_own_bulk(shard):
    """A batch has one class, but the books must hold whatever a call brings."""
    items = []
    for job_class, blocks in (("bulk", 10), ("interactive", 10), ("interactive", 1)):
        job_id = await shard.enqueue(job_class=job_class)
        items.append(
            DispatchItem(
                job_id=job_id,
                tokens=1,
                token_ids=b"\1\0\0\0",
                bucket="128",
                cost_blocks=blocks,
                entry_key=lane(job_class),
            )
        )
    replies = await shard.scripts.dispatch(
        fence=shard.fence, group="g1", batch="b", lease_ms=HOUR_MS, items=items
    )
    statuses = [reply.status for reply in replies]
    assert statuses == ["dispatched", "dispatched", "no_credit"]


@pytest.mark.parametrize("way", ["release", "cancel", "fail", "expire", "lease"])
async def test_bulk_gives_its_books_back_however_it_leaves(shard, way):
    job_id = await shard.enqueue(job_class="bulk", deadline_ms=HOUR_MS)
    reply = await shard.dispatch(job_id, entry_key=lane("bulk"))
    await shard.start(job_id, reply.epoch)
    if way == "release":
        await shard.scripts.release(group="g1", jobs=[(job_id, reply.epoch)])
    elif way == "cancel":
        await shard.scripts.cancel(job_id)
        await shard.finish(job_id, reply.epoch, state="cancelled")
    elif way == "fail":
        await shard.fail(job_id, reply.epoch)
    else:
        zset = KEYS.deadline if way == "expire" else KEYS.lease
        await shard.overdue(zset, job_id)
        await shard.reap()
    assert await books(shard) == ((10, 4, 100), (0, 0, 0))


async def test_a_group_that_comes_back_has_the_same_books(shard):
    await give(shard, "bulk", cost_blocks=3, tokens=20)
    await give(shard, "interactive", cost_blocks=9, tokens=90)
    before = await books(shard)
    assert before == ((-2, 2, -10), (3, 1, 20))
    await shard.client.delete(KEYS.group("g1"))
    await shard.scripts.heartbeat("g1", group_info("g1", **ROOM), HOUR_MS)
    assert await books(shard) == before


async def test_a_group_of_an_older_version_keeps_no_books_of_bulk(shard):
    await shard.client.hdel(
        KEYS.group("g1"), "bulk_blocks", "bulk_running", "bulk_tokens", "schema"
    )
    job_id, status = await give(shard, "bulk", cost_blocks=8)
    assert status == "dispatched"
    assert await books(shard) == ((2, 3, 88), (0, 0, 0))
    assert (await give(shard, "interactive", cost_blocks=3))[1] == "no_credit"
    await shard.start(job_id, 1)
    assert await shard.finish(job_id, 1) == "recorded"
    assert await books(shard) == ((10, 4, 100), (0, 0, 0))
    # Such a group would read books of others as its own, and trust them.
    assert not await shard.client.hexists(KEYS.group("g1"), "bulk_blocks")


@pytest.mark.parametrize(("schema", "goes"), [(1, False), (2, True), (3, True)])
async def test_a_job_goes_only_to_a_group_that_reads_its_version(shard, schema, goes):
    info: GroupInfo = group_info("g1", **ROOM, schema=schema, serves="short")
    await shard.scripts.heartbeat("g1", info, HOUR_MS)
    (group,) = await shard.scripts.groups()
    assert (group.schema, group.serves) == (schema, "short")
    job_id = await shard.enqueue(v=2)
    reply = await shard.dispatch(job_id)
    assert (reply.status, reply.epoch) == (("dispatched", 1) if goes else ("newer", 2))
    assert (await shard.dispatch(await shard.enqueue(v=1))).status == "dispatched"
