"""What a run may take of Redis, and whom it tells of its end."""

from pathlib import Path

import msgspec
import pytest
import redis.asyncio
from support.bulk_jobs import MODEL, Jobs, settled

from tokenmill.scheduler.bulk.advance import advance
from tokenmill.scheduler.bulk.pool import BulkPool
from tokenmill.scheduler.bulk.results import RECORDED_MS
from tokenmill.scheduler.bulk.sweeping import sweep
from tokenmill.shared.bulk.keys import new_run_id
from tokenmill.shared.bulk.messages import Item, RunSpec
from tokenmill.shared.bulk.store import RunStore
from tokenmill.shared.config import BulkConfig, Config
from tokenmill.shared.keys import POOL
from tokenmill.shared.messages import JobError, PoolCard, Prompt, encode
from tokenmill.shared.webhook_keys import ANNOUNCED

pytest_plugins = "support.bulk_core_fixtures"

CONFIG = Config(bulk=BulkConfig(max_open_jobs=10, keep_s=60))
WINDOW = 20
ITEMS = 120


async def begin(client: "redis.asyncio.Redis", **fields: object) -> RunStore:
    store = RunStore(client, new_run_id(), keep_ms=60_000)
    await store.create(RunSpec(kind="run", **fields))  # type: ignore[arg-type]
    return store


async def end_all(pool: BulkPool, jobs: Jobs, store: RunStore) -> None:
    ids = await jobs.waiting()
    for job_id in ids:
        await jobs.end(job_id)
    await pool.writes(store.run_id).mark_ended(ids)
    await advance(pool, store.run_id)


async def test_a_run_of_any_length_takes_a_bounded_number_of_keys(
    client: "redis.asyncio.Redis", jobs: Jobs
):
    store, pool = await begin(client), BulkPool(client, CONFIG)
    fed, seen, most = 0, set(), 0
    while len(seen) < ITEMS:
        room = WINDOW - (await store.view()).in_redis
        new = range(fed, min(fed + room, ITEMS))
        await store.feed([Item(seq=s, prompt=Prompt("x", model=MODEL)) for s in new])
        fed += len(new)
        await advance(pool, store.run_id)
        names = [key async for key in client.scan_iter(f"{store.keys.prefix}*")]
        most = max(most, len(names))
        await end_all(pool, jobs, store)
        seqs = [one.seq for _, one in await store.outcomes()]
        assert seen.isdisjoint(seqs)
        seen.update(seqs)
        await store.ack(seqs)
    assert most <= WINDOW + len(store.keys.all_but_items)
    assert (await store.view()).acknowledged == ITEMS


async def test_a_webhook_is_told_of_the_end_once(
    client: "redis.asyncio.Redis", jobs: Jobs
):
    url = "https://example.org/hook"
    store = await begin(client, name="nightly", webhook=url)
    pool = BulkPool(client, CONFIG)
    await store.feed([Item(seq=0, prompt=Prompt("x", model=MODEL))])
    await advance(pool, store.run_id)
    await end_all(pool, jobs, store)
    assert await client.xlen(ANNOUNCED) == 0, "more may be fed"
    await store.set_total()
    await advance(pool, store.run_id)
    await advance(pool, store.run_id)
    await sweep(pool)
    [(_, fields)] = await client.xrange(ANNOUNCED)
    assert fields[b"url"].decode() == url
    assert fields[b"type"] == b"bulk.complete"
    told = msgspec.json.decode(fields[b"data"])
    assert (told["run"], told["name"]) == (store.run_id, "nightly")
    assert (told["total"], told["succeeded"], told["failed"]) == (1, 1, 0)


async def test_a_large_prompt_goes_by_the_store(
    client: "redis.asyncio.Redis", jobs: Jobs, tmp_path: Path
):
    card = PoolCard(
        storage_url=tmp_path.as_uri(), offload_bytes=1000, max_input_bytes=100_000
    )
    await client.set(POOL, encode(card))
    store, pool = await begin(client, tenant="t"), BulkPool(client, CONFIG)
    text = "long " * 1000
    await store.feed([Item(seq=0, prompt=Prompt(text, model=MODEL))])
    await advance(pool, store.run_id)
    [job_id] = await jobs.wait_for(1)
    request = await jobs.request(job_id)
    assert request.text is None
    assert request.text_ref is not None
    assert request.text_ref.name.startswith("t/")
    assert (tmp_path / request.text_ref.name).read_text() == text


async def test_a_store_that_is_away_pauses_the_run(
    client: "redis.asyncio.Redis", jobs: Jobs, tmp_path: Path
):
    missing = (tmp_path / "file").joinpath("store")
    (tmp_path / "file").write_text("in the way")
    card = PoolCard(
        storage_url=missing.as_uri(), offload_bytes=1000, max_input_bytes=100_000
    )
    await client.set(POOL, encode(card))
    store, pool = await begin(client), BulkPool(client, CONFIG)
    await store.feed([Item(seq=0, prompt=Prompt("long " * 1000, model=MODEL))])
    assert await advance(pool, store.run_id) == 2.0
    assert await jobs.waiting() == []
    (tmp_path / "file").unlink()
    assert await advance(pool, store.run_id) is None
    assert len(await jobs.waiting()) == 1


@pytest.mark.parametrize("is_dead_letter", [True, False])
async def test_only_dead_letters_outlive_the_record_of_their_end(
    client: "redis.asyncio.Redis", jobs: Jobs, is_dead_letter: bool
):
    store, pool = await begin(client), BulkPool(client, CONFIG)
    await store.feed([Item(seq=0, prompt=Prompt("x", model=MODEL))])
    await advance(pool, store.run_id)
    [job_id] = await jobs.wait_for(1)
    key = jobs.scripts.keys.job(job_id)
    await jobs.end(job_id, error=JobError("lease_lost", "workers were lost"))
    await client.pexpire(key, 604_800_000 if is_dead_letter else pool.job_keep_ms)
    await pool.writes(store.run_id).mark_ended([job_id])
    await advance(pool, store.run_id)
    [outcome] = await settled(store, 1)
    assert outcome.state == "failed"
    assert (await client.pttl(key) > RECORDED_MS) == is_dead_letter
