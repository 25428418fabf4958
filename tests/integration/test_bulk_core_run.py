"""Runs of requests: sent within bounds, settled once, whatever is missed or repeats."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import redis.asyncio
from arq import Retry
from arq.constants import in_progress_key_prefix
from support.bulk_jobs import KEYS, MODEL, Jobs, settled
from support.leaks import leaked_keys
from support.servers import RedisServer
from support.waiting import wait_until

from tokenmill.scheduler.bulk import advance as advancing
from tokenmill.scheduler.bulk import requests, service
from tokenmill.scheduler.bulk.advance import advance
from tokenmill.scheduler.bulk.pool import BulkPool
from tokenmill.scheduler.bulk.running import supervise_bulk
from tokenmill.scheduler.bulk.sweeping import sweep
from tokenmill.shared.bulk.keys import RUNS, RunKeys, new_run_id
from tokenmill.shared.bulk.messages import Item, RunSpec
from tokenmill.shared.bulk.store import RunStore, orchestrator_alive
from tokenmill.shared.config import BulkConfig, Config
from tokenmill.shared.errors import RedisUnavailable
from tokenmill.shared.keys import JobId
from tokenmill.shared.messages import JobError, Prompt, Sampling
from tokenmill.shared.new_job import new_job
from tokenmill.shared.script_types import NewJob

pytest_plugins = "support.bulk_core_fixtures"

CONFIG = Config(bulk=BulkConfig(max_open_jobs=4, keep_s=60))
SPEC = RunSpec(kind="run", tenant="t", priority=7)


@pytest.fixture
async def store(client: "redis.asyncio.Redis") -> RunStore:
    made = RunStore(client, new_run_id(), keep_ms=60_000)
    await made.create(SPEC)
    return made


def item(seq: int, generation: int = 0, **fields: object) -> Item:
    prompt = Prompt(f"prompt {seq}", model=MODEL, tenant="other", **fields)  # type: ignore[arg-type]
    return Item(seq=seq, generation=generation, custom_id=f"c{seq}", prompt=prompt)


@contextlib.asynccontextmanager
async def orchestrating(
    server: RedisServer, config: Config = CONFIG
) -> AsyncIterator[None]:
    task = asyncio.create_task(supervise_bulk(server.url, config))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def pool(client: "redis.asyncio.Redis") -> BulkPool:
    return BulkPool(client, CONFIG)


async def test_items_go_through_a_bounded_number_of_jobs_and_settle_once(
    client: "redis.asyncio.Redis",
    jobs: Jobs,
    store: RunStore,
    newest_redis: RedisServer,
):
    await store.feed([item(seq) for seq in range(6)])
    await store.set_total()
    async with orchestrating(newest_redis):
        first = await jobs.wait_for(4)
        record = await jobs.scripts.job(first[0])
        assert record is not None
        facts = {name: record[name] for name in ("class", "tenant", "priority")}
        assert facts == {"class": "bulk", "tenant": "t", "priority": "7"}
        await jobs.end(first[0], "one")
        await jobs.end(first[1], error=JobError("engine_error", "broken"))
        second = await jobs.wait_for(4)
        assert len({*first, *second}) == 6
        for job_id in second:
            await jobs.end(job_id)
        outcomes = await settled(store, 6)
        assert await orchestrator_alive(client)
    assert [one.custom_id for one in outcomes] == [f"c{seq}" for seq in range(6)]
    assert [one.state for one in outcomes[:3]] == ["succeeded", "failed", "succeeded"]
    assert outcomes[0].result is not None
    assert outcomes[0].result.text == "one"
    assert outcomes[1].error == JobError("engine_error", "broken")
    assert outcomes[0].usage.prompt_tokens == 10
    view = await store.view()
    assert (view.state, view.jobs, view.open_jobs) == ("complete", 6, 0)
    assert (view.prompt_tokens, view.completion_tokens) == (60, 24)


async def test_a_pass_that_is_repeated_or_interrupted_anywhere_changes_nothing(
    client: "redis.asyncio.Redis", jobs: Jobs, store: RunStore, pool: BulkPool
):
    """The connection breaks after each number of commands in turn."""
    await store.feed([item(seq) for seq in range(4)])
    for stop in range(1, 40):
        flaky = BulkPool(_Breaking(client, stop), CONFIG)  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError, RedisUnavailable):
            await advance(flaky, store.run_id)
        await sweep(pool)
        for job_id in (await jobs.waiting())[:1]:
            await jobs.end(job_id, with_event=False)
    while (await store.view()).settled < 4:
        await sweep(pool)
        await advance(pool, store.run_id)
        for job_id in await jobs.waiting():
            await jobs.end(job_id, with_event=False)
    outcomes = await settled(store, 4)
    assert [one.seq for one in outcomes] == [0, 1, 2, 3]
    view = await store.view()
    assert (view.succeeded, view.settled, view.jobs) == (4, 4, 4)


class _Breaking:
    """A client whose connection breaks after some commands."""

    def __init__(self, client: "redis.asyncio.Redis", left: int) -> None:
        self._client, self._left = client, [left]

    def __getattr__(self, name: str) -> object:
        found = getattr(self._client, name)
        if name == "pipeline":
            return lambda **k: _BreakingPipe(found(**k), self._left)
        if not callable(found):
            return found

        async def call(*args: object, **options: object) -> object:
            _spend(self._left)
            return await found(*args, **options)

        return call


class _BreakingPipe:
    def __init__(self, pipe: object, left: list[int]) -> None:
        self._pipe, self._left = pipe, left

    def __getattr__(self, name: str) -> object:
        return getattr(self._pipe, name)

    async def execute(self, **options: object) -> object:
        _spend(self._left)
        return await self._pipe.execute(**options)  # type: ignore[attr-defined]


def _spend(left: list[int]) -> None:
    left[0] -= 1
    if left[0] < 0:
        raise ConnectionError


async def test_missed_events_and_lost_jobs_are_found_by_the_sweep(
    jobs: Jobs, store: RunStore, pool: BulkPool
):
    await store.feed([item(0), item(1)])
    await advance(pool, store.run_id)
    ended, lost = await jobs.wait_for(2)
    await jobs.end(ended, with_event=False)
    await jobs.lose(lost)
    assert await advance(pool, store.run_id) is None
    assert (await store.view()).settled == 0
    assert await sweep(pool) == 1
    await advance(pool, store.run_id)
    assert [one.seq for one in await settled(store, 1)] == [0]
    assert await jobs.wait_for(1) == [lost], "sent again under its own id"


async def test_a_full_queue_pauses_the_run_and_loses_nothing(
    jobs: Jobs, store: RunStore, pool: BulkPool
):
    await jobs.limit(3)  # of which one place is left to others
    await store.feed([item(seq) for seq in range(4)])
    pause_s = await advance(pool, store.run_id)
    assert pause_s is not None
    assert 0 < pause_s <= 2.0
    assert len(await jobs.waiting()) == 2
    view = await store.view()
    assert view.open_jobs == 4
    for job_id in await jobs.waiting():
        await jobs.end(job_id)
        await pool.writes(store.run_id).mark_ended([job_id])
    await advance(pool, store.run_id)
    for job_id in await jobs.wait_for(2):
        await jobs.end(job_id)
        await pool.writes(store.run_id).mark_ended([job_id])
    await advance(pool, store.run_id)
    assert len(await settled(store, 4)) == 4


async def test_bad_items_settle_by_themselves(
    jobs: Jobs, store: RunStore, pool: BulkPool
):
    wrong = item(1, sampling=Sampling(max_tokens=0))
    await store.feed([item(0), wrong])
    await advance(pool, store.run_id)
    [outcome] = await settled(store, 1)
    assert (outcome.seq, outcome.state, outcome.custom_id) == (1, "failed", "c1")
    assert outcome.error is not None
    assert outcome.error.field == "sampling.max_tokens"
    assert len(await jobs.waiting()) == 1


async def test_cancelling_ends_open_jobs_and_settles_every_item(
    jobs: Jobs, store: RunStore, pool: BulkPool
):
    await store.feed([item(seq) for seq in range(7)])
    await advance(pool, store.run_id)
    await store.cancel()
    while (await store.view()).state != "cancelled":
        await advance(pool, store.run_id)
    outcomes = await settled(store, 7)
    assert {one.state for one in outcomes} == {"cancelled"}
    assert await jobs.waiting() == []
    await store.reopen()
    assert await store.feed([item(0, 1)]) == ["new"]
    await advance(pool, store.run_id)
    [again] = await jobs.wait_for(1)
    assert again != outcomes[0].job_ids[0]


async def test_runs_take_turns(
    client: "redis.asyncio.Redis",
    jobs: Jobs,
    store: RunStore,
    newest_redis: RedisServer,
):
    """A run of many items does not keep another one waiting."""
    small = RunStore(client, new_run_id(), keep_ms=60_000)
    await small.create(SPEC)
    await store.feed([item(seq) for seq in range(100)])
    await small.feed([item(0)])
    async with orchestrating(newest_redis):

        async def has_turn() -> bool:
            return any(small.run_id in job_id for job_id in await jobs.waiting())

        await wait_until(has_turn)
        assert len(await jobs.waiting()) <= 5


async def test_a_finished_run_leaves_nothing_that_stays(
    client: "redis.asyncio.Redis", jobs: Jobs, store: RunStore, pool: BulkPool
):
    await store.feed([item(0), item(1)])
    await store.set_total()
    await advance(pool, store.run_id)
    ids = await jobs.wait_for(2)
    for job_id in ids:
        await jobs.end(job_id)
    await pool.writes(store.run_id).mark_ended(ids)
    await advance(pool, store.run_id)
    assert await store.ack([0, 1]) == 2
    left = {key.decode() async for key in client.scan_iter(f"{store.keys.prefix}*")}
    # An empty stream keeps its last id until it expires.
    assert left == {store.keys.record, store.keys.out}
    assert await leaked_keys(client) == []
    for job_id in ids:
        assert 0 < await client.pttl(KEYS.job(job_id)) <= 60_000
        assert 0 < await client.pttl(KEYS.output(job_id)) <= 60_000
    await client.delete(*left)
    assert await sweep(pool) == 0
    assert await client.zcard(RUNS) == 0


async def test_items_of_a_driver_that_lives_never_expire(
    client: "redis.asyncio.Redis", store: RunStore, pool: BulkPool
):
    keys = RunKeys(store.run_id)
    await store.feed([item(0)])
    await client.pexpire(keys.item(0), 5000)
    await sweep(pool)
    assert await client.pttl(keys.item(0)) <= 5000, "not yet"
    await client.hset(keys.record, "renewed_ms", "1")
    await sweep(pool)
    assert await client.pttl(keys.item(0)) > 50_000
    await client.hset(keys.record, mapping={"renewed_ms": "1", "driver_ms": "1"})
    await client.pexpire(keys.item(0), 5000)
    await sweep(pool)
    assert await client.pttl(keys.item(0)) <= 5000, "its driver is gone"


async def test_the_hash_of_a_job_is_the_same_each_time_it_is_made(
    jobs: Jobs, store: RunStore, pool: BulkPool
):
    """What is enqueued again is then a duplicate of itself, not a conflict."""
    await store.feed([item(0)])
    await advance(pool, store.run_id)
    [job_id] = await jobs.wait_for(1)
    before = await jobs.scripts.job(job_id)
    await pool.writes(store.run_id).mark_unsent([job_id])
    await advance(pool, store.run_id)
    assert await jobs.scripts.job(job_id) == before
    assert await pool.writes(store.run_id).unsent(10) == []
    assert JobId.parse(job_id).unique[1:11] == store.run_id
    assert msgspec.structs.asdict(await store.view())["open_jobs"] == 1


async def test_two_janitors_do_each_thing_once(
    client: "redis.asyncio.Redis",
    jobs: Jobs,
    store: RunStore,
    newest_redis: RedisServer,
):
    await store.feed([item(seq) for seq in range(24)])
    ends = 0
    async with orchestrating(newest_redis), orchestrating(newest_redis):

        async def finished() -> bool:
            nonlocal ends
            for job_id in await jobs.waiting():
                await jobs.end(job_id)
                ends += 1
            return (await store.view()).settled == 24

        await wait_until(finished)
    assert ends == 24, "no job was sent twice"
    assert len(await settled(store, 24)) == 24
    assert (await store.view()).jobs == 24


async def test_all_jobs_that_redis_lost_are_sent_again_in_one_pass(
    jobs: Jobs, store: RunStore, pool: BulkPool, monkeypatch: pytest.MonkeyPatch
):
    await store.feed([item(seq) for seq in range(4)])
    await advance(pool, store.run_id)
    ids = await jobs.wait_for(4)
    for job_id in ids:
        await jobs.lose(job_id)
    await sweep(pool)
    monkeypatch.setattr(advancing, "PASS_JOBS", 1)
    await advance(pool, store.run_id)
    assert await jobs.wait_for(4) == ids


async def test_a_fault_at_one_item_fails_it_alone(
    jobs: Jobs, store: RunStore, pool: BulkPool, monkeypatch: pytest.MonkeyPatch
):
    def faulty(prompt: Prompt, *rest: Any) -> NewJob:
        if prompt.text == "prompt 1":
            raise ValueError("a fault of ours")
        return new_job(prompt, *rest)

    await store.feed([item(0)])
    await advance(pool, store.run_id)
    monkeypatch.setattr(requests, "new_job", faulty)
    await store.feed([item(1), item(2)])
    await advance(pool, store.run_id)
    [outcome] = await settled(store, 1)
    assert outcome.seq == 1
    assert outcome.error is not None
    assert outcome.error.code == "internal_error"
    assert len(await jobs.waiting()) == 2


async def test_the_mark_of_a_task_comes_back_after_it_has_expired(
    client: "redis.asyncio.Redis",
    store: RunStore,
    pool: BulkPool,
    monkeypatch: pytest.MonkeyPatch,
):
    """Its process was held up; another must not begin the same beside it."""
    name = service.task_id(store.run_id)
    key = f"{in_progress_key_prefix}{name}"

    async def slow(*_: object) -> None:
        assert not await client.exists(key)
        await wait_until(lambda: client.exists(key), what="the mark")

    monkeypatch.setattr(service, "RENEW_S", 0.01)
    monkeypatch.setattr(service, "advance", slow)
    monkeypatch.setattr(service, "sweep", slow)
    context = {service.POOL_FIELD: pool, "job_id": name}
    await service.advance_run(context, store.run_id)
    assert 0 < await client.pttl(key) <= 1000 * service.IN_PROGRESS_S
    await client.delete(key)
    await service.sweep_runs(context)
    assert await client.exists(key)


async def test_an_error_that_nobody_foresaw_is_met_again_and_not_lost(
    store: RunStore, pool: BulkPool, monkeypatch: pytest.MonkeyPatch
):
    async def broken(*_: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(service, "advance", broken)
    context = {service.POOL_FIELD: pool, "job_id": "x"}
    with pytest.raises(Retry) as caught:
        await service.advance_run(context, store.run_id)
    assert caught.value.defer_score == 1000 * service.BROKEN_S
    assert pool.busy == set()
