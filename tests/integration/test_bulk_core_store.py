"""A run in Redis: what the driver writes and reads, each safe to repeat."""

import asyncio

import msgspec
import pytest
import redis.asyncio
from support.leaks import leaked_keys
from support.waiting import loop_turns, wait_until

from tokenmill.shared.bulk.keys import DIRTY, RunKeys, new_run_id
from tokenmill.shared.bulk.messages import Document, Item, Outcome, RunSpec
from tokenmill.shared.bulk.store import RunStore, list_runs
from tokenmill.shared.bulk.writes import NewOutcome, Opening, RunWrites
from tokenmill.shared.errors import InvalidRequest, UnknownRun
from tokenmill.shared.messages import Prompt, Usage

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
    assert await store.feed([item(0, 2)]) == ["new"]
    view = await store.view()
    assert (view.fed, view.failed, view.in_redis) == (3, 0, 3)


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
    await store.set_total(3)
    assert (await store.view()).state == "open"
    await writes.settle([outcome(2)])
    assert (await store.view()).state == "complete"
    assert await leaked_keys(redis_client) == []


async def test_waiting_ends_with_the_first_outcome(
    run: tuple[RunStore, RunWrites],
):
    store, writes = run
    await store.feed([item(0)])
    waiting = asyncio.create_task(store.wait(timeout_s=2))
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
        missing.set_total(1),
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
    store = RunStore(redis_client, new_run_id(), keep_ms=1000)
    await store.create(SPEC)
    await store.feed([item(0)])
    await wait_until(lambda: _gone(redis_client, store), timeout_s=4)
    with pytest.raises(UnknownRun):
        await store.view()
    assert await list_runs(redis_client) == []


async def _gone(client: "redis.asyncio.Redis", store: RunStore) -> bool:
    return not [key async for key in client.scan_iter(f"{store.keys.prefix}*")]
