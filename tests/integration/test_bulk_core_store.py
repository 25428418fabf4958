"""A run in Redis: what the driver writes and reads, each safe to repeat."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import redis.asyncio
import structlog
from support.leaks import leaked_keys
from support.waiting import loop_turns, wait_until

from tokenmill.producer.bulk.store_calls import StoreCalls
from tokenmill.scheduler.bulk.pool import BulkPool
from tokenmill.scheduler.bulk.sweeping import sweep
from tokenmill.scheduler.shown import RunGauges
from tokenmill.shared.bulk.keys import DIRTY, RUNS, RunKeys, new_run_id
from tokenmill.shared.bulk.messages import VERSION, Document, Item, Outcome, RunSpec
from tokenmill.shared.bulk.store import RunStore, list_runs
from tokenmill.shared.bulk.writes import NewOutcome, Opening, Recording, RunWrites
from tokenmill.shared.config import Config
from tokenmill.shared.errors import InvalidRequest, ProtocolError, UnknownRun
from tokenmill.shared.messages import Prompt, Usage
from tokenmill.shared.metrics import catalog
from tokenmill.shared.pool.bulk_checks import examine_bulk

SPEC = RunSpec(kind="run", tenant="t", name="n")


def item(seq: int, generation: int = 0) -> Item:
    prompt = Prompt(f"prompt {seq}")
    return Item(seq=seq, generation=generation, custom_id=f"c{seq}", prompt=prompt)


def outcome(seq: int, generation: int = 0, state: str = "succeeded") -> NewOutcome:
    made = Outcome(
        seq=seq,
        generation=generation,
        custom_id=f"c{seq}",
        state=state,  # type: ignore[arg-type]
        usage=Usage(prompt_tokens=3, completion_tokens=2),
    )
    return NewOutcome(outcome=made, open_ids=(f"job{seq}",), jobs=1)


@pytest.fixture
async def run(redis_client: "redis.asyncio.Redis") -> tuple[RunStore, RunWrites]:
    store = RunStore(redis_client, new_run_id(), keep_ms=60_000)
    assert await store.create(SPEC)
    return store, RunWrites(redis_client, store.run_id, keep_ms=60_000)


async def test_creating_twice_is_the_same_run_and_another_spec_is_refused(
    redis_client: "redis.asyncio.Redis", run: tuple[RunStore, RunWrites]
):
    store, _ = run
    assert not await store.create(SPEC)
    with pytest.raises(InvalidRequest, match="other settings"):
        await store.create(RunSpec(kind="summarize"))
    [view] = await list_runs(redis_client)
    assert (view.run, view.spec, view.state) == (store.run_id, SPEC, "open")


async def test_feeding_is_idempotent_and_a_later_generation_replaces_a_settled_one(
    redis_client: "redis.asyncio.Redis", run: tuple[RunStore, RunWrites]
):
    store, writes = run
    assert await store.feed([item(0), item(1)]) == ["new", "new"]
    assert await redis_client.smembers(DIRTY) == {store.run_id.encode()}
    assert await store.feed([item(0), item(2)]) == ["known", "new"]
    assert await store.feed([item(0, 1)]) == ["known"], "it has not settled"
    assert await writes.settle([outcome(0, state="failed")]) == [True]
    view = await store.view()
    assert (view.fed, view.settled, view.failed) == (3, 1, 1)
    assert await store.feed([item(0)]) == ["known"], "it has settled"
    assert await store.feed([item(0, 1)]) == ["new"]
    view = await store.view()
    assert (view.fed, view.settled, view.failed, view.in_redis) == (3, 0, 0, 3)
    assert await store.outcomes() == []
    await writes.settle([outcome(0, 1, state="failed")])
    assert await store.ack([0]) == 1
    again = msgspec.structs.replace(item(0, 2), replaces="failed")
    assert await store.feed([again]) == ["new"]
    assert await store.feed([again]) == ["known"]
    view = await store.view()
    assert (view.fed, view.failed, view.in_redis) == (3, 0, 3)


async def test_counters_are_lowered_by_what_is_replaced_and_by_nothing_else(
    run: tuple[RunStore, RunWrites],
):
    store, writes = run
    await store.feed([item(seq) for seq in range(4)])
    states = ("failed", "cancelled", "cancelled", "succeeded")
    await writes.settle([outcome(s, state=state) for s, state in enumerate(states)])
    await store.ack([0, 1])
    again = msgspec.structs.replace(item(1, 1), replaces="cancelled")
    # The outcomes of 2 and 3 are not acknowledged: how they settled stands in Redis.
    assert await store.feed([again, item(2, 1), item(3, 1)]) == ["new"] * 3
    assert await store.outcomes() == []
    view = await store.view()
    assert (view.fed, view.succeeded, view.failed, view.cancelled) == (4, 0, 1, 0)
    assert (view.settled, view.acknowledged, view.in_redis) == (1, 1, 3)


async def test_a_run_whose_record_was_lost_comes_to_its_end(
    redis_client: "redis.asyncio.Redis", run: tuple[RunStore, RunWrites]
):
    """Two items have their lines; the record that counted them is gone."""
    store, writes = run
    await store.feed([item(0), item(1)])
    await writes.settle([outcome(0), outcome(1, state="failed")])
    await store.ack([0, 1])
    await redis_client.delete(store.keys.record)
    assert await store.create(SPEC)
    await store.feed([item(2), item(1, 1)])
    await store.set_total()
    assert (await store.view()).state == "open"
    await writes.settle([outcome(2), outcome(1, 1)])
    view = await store.view()
    assert (view.state, view.total, view.settled) == ("complete", 2, 2)


async def test_a_run_that_goes_on_is_not_complete_until_all_is_fed(
    run: tuple[RunStore, RunWrites],
):
    store, writes = run
    await store.feed([item(0), item(1)])
    await store.set_total()
    await writes.settle([outcome(0, state="failed"), outcome(1, state="failed")])
    await store.ack([0, 1])
    assert (await store.view()).state == "complete"
    await store.create(SPEC)  # a driver that tries them again
    for seq in (0, 1):
        again = msgspec.structs.replace(item(seq, 1), replaces="failed")
        await store.feed([again])
        await writes.settle([outcome(seq, 1)])
        assert (await store.view()).state == "open"
    await store.set_total()
    view = await store.view()
    assert (view.state, view.fed, view.failed, view.succeeded) == ("complete", 2, 0, 2)


class _Session:
    """Of a client that has all the patience it needs."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.redis = client

    async def patiently(self, call: Callable[[], Awaitable[object]]) -> object:
        return await call()


async def test_a_new_record_is_not_lowered_by_what_it_never_counted(
    redis_client: "redis.asyncio.Redis", run: tuple[RunStore, RunWrites]
):
    """The record is lost, and items are tried again that had failed in it."""
    store, writes = run
    calls = StoreCalls(_Session(redis_client), store.run_id, SPEC, keep_ms=60_000)  # type: ignore[arg-type]
    await redis_client.delete(store.keys.record)
    again = [msgspec.structs.replace(item(seq, 1), replaces="failed") for seq in (0, 1)]
    await calls.create()
    await calls.feed(again[:1])
    await writes.settle([outcome(0, 1, state="failed")])
    await calls.feed(again[1:])
    view = await store.view()
    assert (view.fed, view.settled, view.failed) == (2, 1, 1)


async def test_the_end_of_the_input_is_not_said_to_a_record_that_was_lost(
    redis_client: "redis.asyncio.Redis", run: tuple[RunStore, RunWrites]
):
    """It would be complete with nothing in it."""
    store, _ = run
    calls = StoreCalls(_Session(redis_client), store.run_id, SPEC, keep_ms=60_000)  # type: ignore[arg-type]
    await redis_client.delete(store.keys.record)
    await calls.set_total()
    assert ((await store.view()).state, calls.losses) == ("open", 1)


async def test_a_run_that_is_complete_is_not_cancelled(
    run: tuple[RunStore, RunWrites],
):
    store, writes = run
    await store.feed([item(0)])
    await store.set_total()
    await writes.settle([outcome(0)])
    assert await store.cancel() == "complete"
    view = await store.view()
    assert (view.state, view.succeeded) == ("complete", 1)


async def test_a_record_that_has_expired_is_not_made_again_in_part(
    redis_client: "redis.asyncio.Redis", run: tuple[RunStore, RunWrites]
):
    store, writes = run
    await store.feed([item(0)])
    await redis_client.delete(store.keys.record)
    opening = Opening(
        seq=0,
        generation=0,
        cursor="",
        next_cursor="0:1",
        more=False,
        ids=("j",),
        windows=1,
    )
    assert await writes.open([opening]) == [False]
    recording = Recording(
        job_id="j",
        seq=0,
        generation=0,
        level=0,
        index=0,
        of=1,
        value="{}",
        prompt_tokens=1,
        completion_tokens=1,
        fell_back=False,
    )
    assert await writes.record([recording]) == [True]
    await writes.set_renewed()
    await writes.set_announced("complete:1:1:0:0")
    assert not await redis_client.exists(store.keys.record)
    assert await leaked_keys(redis_client) == []


async def test_an_outcome_is_recorded_once_and_leaves_when_acknowledged(
    redis_client: "redis.asyncio.Redis", run: tuple[RunStore, RunWrites]
):
    store, writes = run
    await store.feed([item(seq) for seq in range(3)])
    assert await writes.settle([outcome(0), outcome(1)]) == [True, True]
    assert await writes.settle([outcome(1), outcome(2, generation=1)]) == [False] * 2
    rows = await store.outcomes()
    assert [one.custom_id for _, one in rows] == ["c0", "c1"]
    assert await store.outcomes(after=rows[0][0]) == rows[1:]
    view = await store.view()
    assert (view.settled, view.jobs, view.prompt_tokens) == (2, 2, 6)
    assert await store.ack([0, 1, 2]) == 2, "2 has not settled"
    assert await store.ack([0, 1]) == 0
    assert await store.outcomes() == []
    assert not await redis_client.exists(RunKeys(store.run_id).item(0))
    assert (await store.view()).in_redis == 1
    await store.set_total()
    assert (await store.view()).state == "open"
    await writes.settle([outcome(2)])
    assert (await store.view()).state == "complete"
    assert await leaked_keys(redis_client) == []


async def test_waiting_ends_with_the_first_outcome(
    run: tuple[RunStore, RunWrites],
):
    store, writes = run
    await store.feed([item(0)])
    waiting = asyncio.create_task(store.wait(timeout_s=60))
    await loop_turns(3)
    await writes.settle([outcome(0)])
    [(entry, _)] = await waiting
    assert await store.wait(entry, timeout_s=0.01) == []


async def test_opening_moves_an_item_once(
    redis_client: "redis.asyncio.Redis", run: tuple[RunStore, RunWrites]
):
    store, writes = run
    await store.feed([item(0)])
    opening = Opening(
        seq=0, generation=0, cursor="", next_cursor="0:1", more=False, ids=("j",)
    )
    assert await writes.open([opening]) == [True]
    assert await writes.open([opening]) == [False]
    assert await writes.unsent() == ["j"]
    assert (await store.view()).open_jobs == 1
    assert await writes.ready(10) == []
    assert await writes.mark_ended(["j", "stranger"]) == 1
    assert await writes.ended(10) == ["j"]


async def test_a_cancelled_run_takes_no_items_until_it_is_reopened(
    run: tuple[RunStore, RunWrites],
):
    store, writes = run
    await store.feed([item(0)])
    assert await store.cancel() == "cancelling"
    assert await store.cancel() == "cancelling"
    assert await store.feed([item(1)]) == ["closed"]
    assert await store.beat() == "cancelling"
    await writes.settle([outcome(0, state="cancelled")])
    assert await writes.set_cancelled() == "cancelled"
    assert await store.reopen() == "open"
    assert await store.feed([item(0, 1)]) == ["new"]
    view = await store.view()
    assert (view.fed, view.cancelled, view.settled) == (1, 0, 0)


async def test_unknown_runs_and_wrong_items_are_refused_by_name(
    redis_client: "redis.asyncio.Redis", run: tuple[RunStore, RunWrites]
):
    missing = RunStore(redis_client, new_run_id())
    for asked in (
        missing.view(),
        missing.feed([item(0)]),
        missing.cancel(),
        missing.beat(),
        missing.set_total(),
    ):
        with pytest.raises(UnknownRun, match=missing.run_id):
            await asked
    store, _ = run
    both = Item(seq=0, prompt=Prompt("x"), document=Document("y"))
    with pytest.raises(InvalidRequest, match="exactly one"):
        await store.feed([both])
    with pytest.raises(InvalidRequest, match="out of range"):
        await store.feed([item(36**7)])
    with pytest.raises(InvalidRequest, match="cannot be a run"):
        RunStore(redis_client, "../etc")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenant", "a:b"),
        ("model", "{x}"),
        ("priority", 101),
        ("max_words", 0),
        ("window_tokens", 10),
        ("overlap_tokens", 2000),
        ("style", "x" * 3000),
    ],
)
async def test_a_wrong_spec_is_refused_by_field(
    redis_client: "redis.asyncio.Redis", field: str, value: object
):
    spec = msgspec.structs.replace(SPEC, **{field: value})
    with pytest.raises(InvalidRequest) as caught:
        await RunStore(redis_client, new_run_id()).create(spec)
    assert caught.value.field == field
    assert await list_runs(redis_client) == []


async def test_everything_of_a_run_expires_after_its_last_touch(
    redis_client: "redis.asyncio.Redis",
):
    store = RunStore(redis_client, new_run_id(), keep_ms=60_000)
    await store.create(SPEC)
    await store.feed([item(0)])
    names = [key async for key in redis_client.scan_iter(f"{store.keys.prefix}*")]
    assert names
    for name in names:
        assert 0 < await redis_client.pttl(name) <= 60_000
        await redis_client.pexpire(name, 1)
    await wait_until(lambda: _gone(redis_client, store))
    with pytest.raises(UnknownRun):
        await store.view()
    assert await list_runs(redis_client) == []


async def _gone(client: "redis.asyncio.Redis", store: RunStore) -> bool:
    return not [key async for key in client.scan_iter(f"{store.keys.prefix}*")]


async def test_runs_that_cannot_be_read_are_left_out_and_named_and_stop_no_other(
    redis_client: "redis.asyncio.Redis", run: tuple[RunStore, RunWrites]
):
    store, _ = run
    damaged, newer, other, odd = (RunKeys(new_run_id()) for _ in range(4))
    spec = msgspec.json.encode(SPEC)
    later = msgspec.json.encode(msgspec.structs.replace(SPEC, v=VERSION + 1))
    for keys, record in (
        (damaged, {"spec": "{"}),
        (newer, {"spec": later}),
        (odd, {"spec": spec, "settled": "x"}),
    ):
        await redis_client.hset(keys.record, mapping=record)
    await redis_client.set(other.record, "a string")
    bad = [keys.run for keys in (damaged, newer, other, odd)]
    await redis_client.zadd(RUNS, dict.fromkeys(bad, 2**50))
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            assert [view.run for view in await list_runs(redis_client)] == [
                store.run_id
            ]
    told = [line["run"] for line in logs if line["event"] == "bulk_run_unreadable"]
    assert sorted(told) == sorted(bad)  # once each
    findings = await examine_bulk(redis_client)
    for name in bad:
        (found,) = [one for one in findings if name in one.message]
        assert found.severity == "warning"
        with pytest.raises(ProtocolError, match=name):
            await RunStore(redis_client, name).view()
    await RunGauges(redis_client)()
    assert catalog.BULK_RUNS.values["open",] == 1
    pool = BulkPool(redis_client, Config())
    try:
        assert await sweep(pool) == 1
    finally:
        pool.close()
    assert await redis_client.zcard(RUNS) == 5  # they may be of a later release
