"""What is heard of ended jobs, and what `doctor` says of runs."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
import redis.asyncio
from support.bulk_jobs import MODEL, Jobs
from support.servers import RedisServer
from support.waiting import wait_until

from tokenmill.scheduler import events
from tokenmill.scheduler.bulk import plans
from tokenmill.scheduler.bulk.advance import advance
from tokenmill.scheduler.bulk.events import on_done
from tokenmill.scheduler.bulk.pool import BulkPool
from tokenmill.scheduler.bulk.service import Teller, advance_run, task_id
from tokenmill.scheduler.bulk.windows import divide
from tokenmill.scheduler.events import DoneEvent, DoneReader
from tokenmill.shared.bulk.dirty import mark_dirty
from tokenmill.shared.bulk.keys import ALIVE, BELL, EVENTS, QUEUE, new_run_id
from tokenmill.shared.bulk.messages import Document, Item, RunSpec
from tokenmill.shared.bulk.store import RunStore
from tokenmill.shared.config import Config
from tokenmill.shared.keys import SHARDS, Keys
from tokenmill.shared.messages import Prompt
from tokenmill.shared.pool.bulk_checks import QUIET_MS, examine_bulk

pytest_plugins = "support.bulk_core_fixtures"

ONE, TWO = Keys("m", 0), Keys("m", 1)


class Heard:
    """A handler that remembers, and fails where it is told to."""

    def __init__(self) -> None:
        self.events: list[tuple[str, DoneEvent]] = []
        self.error: Exception | None = None

    async def __call__(self, keys: Keys, events: Sequence[DoneEvent]) -> None:
        if self.error is not None:
            raise self.error
        self.events += [(keys.shard, event) for event in events]

    @property
    def ids(self) -> list[str]:
        return [event.id for _, event in self.events]


async def ended(client: "redis.asyncio.Redis", keys: Keys, *ids: str) -> None:
    await client.sadd(SHARDS, keys.shard)
    for job_id in ids:
        event = {"id": job_id, "state": "succeeded", "class": "bulk", "webhook": "1"}
        await client.xadd(keys.done, event)


async def test_events_of_all_shards_are_handed_over_once(
    client: "redis.asyncio.Redis",
):
    heard = Heard()
    reader = DoneReader(client, [heard], bell=BELL)
    await ended(client, ONE, "a", "b")
    await ended(client, TWO, "c")
    assert await reader.step() == 3
    assert sorted(heard.ids) == ["a", "b", "c"]
    assert heard.events[0][1].has_webhook
    await ended(client, ONE, "d")
    another = DoneReader(client, [heard], bell=BELL)
    assert await another.step() == 1, "it goes on where the first was"
    assert heard.ids[-1] == "d"
    assert len(await client.hgetall(EVENTS)) == 2


async def test_events_come_again_until_redis_took_what_they_cause(
    client: "redis.asyncio.Redis",
):
    heard = Heard()
    reader = DoneReader(client, [heard], bell=BELL)
    await ended(client, ONE, "a")
    heard.error = redis.exceptions.ConnectionError("away")
    with pytest.raises(redis.exceptions.ConnectionError):
        await reader.step()
    heard.error = None
    await reader.step()
    assert heard.ids == ["a"]


async def test_a_handler_that_breaks_stops_no_other(
    client: "redis.asyncio.Redis",
):
    broken, heard = Heard(), Heard()
    broken.error = ValueError("a fault")
    await ended(client, ONE, "a")
    await DoneReader(client, [broken, heard], bell=BELL).step()
    assert heard.ids == ["a"]


async def test_a_run_that_turns_dirty_ends_the_wait(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(events, "BLOCK_MS", 30_000)
    reader = DoneReader(client, [Heard()], bell=BELL)
    await mark_dirty(client, new_run_id())
    await reader.step()  # what was rung before it began counts too
    waiting = asyncio.create_task(reader.step())
    await wait_until(_blocked(client), what="the reader to wait")
    await mark_dirty(client, new_run_id())
    began = time.monotonic()
    assert await waiting == 0
    assert time.monotonic() - began < 20


def _blocked(client: "redis.asyncio.Redis") -> Callable[[], Awaitable[bool]]:
    async def is_blocked() -> bool:
        return bool((await client.info("clients"))["blocked_clients"])

    return is_blocked


async def test_events_that_concern_nobody_are_passed_over(
    client: "redis.asyncio.Redis",
):
    heard = Heard()
    reader = DoneReader(client, [heard], bell=BELL)
    await client.sadd(SHARDS, ONE.shard)
    for name, more in (("a", {}), ("b", {"webhook": "1"})):
        event = {"id": name, "state": "succeeded", "class": "interactive"}
        await client.xadd(ONE.done, event | more)
    assert await reader.step() == 2
    assert heard.ids == ["b"]


async def test_a_dirty_run_is_queued_once_until_it_is_advanced(
    client: "redis.asyncio.Redis", newest_redis: RedisServer
):
    from arq.connections import ArqRedis

    store = await _fed(client)
    pool = BulkPool(client, Config())
    teller = Teller(pool, ArqRedis(client.connection_pool, default_queue_name=QUEUE))
    await ended(client, ONE)
    await teller.step()
    await teller.step()
    assert await client.zrange(QUEUE, 0, -1) == [task_id(store.run_id).encode()]
    assert await client.exists(ALIVE)


async def test_a_run_that_is_at_work_here_is_left_to_that(
    client: "redis.asyncio.Redis",
):
    store = await _fed(client)
    pool = BulkPool(client, Config())
    pool.busy.add(store.run_id)
    await advance_run({"bulk": pool, "job_id": "x"}, store.run_id)
    assert (await store.view()).ready_items == 1


async def _fed(client: "redis.asyncio.Redis") -> RunStore:
    store = RunStore(client, new_run_id(), keep_ms=60_000)
    await store.create(RunSpec(kind="run"))
    await store.feed([Item(seq=0, prompt=Prompt("x", model=MODEL))])
    return store


async def test_doctor_names_runs_that_are_stuck(client: "redis.asyncio.Redis"):
    [quiet] = await examine_bulk(client)
    assert (quiet.severity, quiet.message) == ("info", "no open runs, 0 kept")
    store = await _fed(client)
    [stuck] = await examine_bulk(client)
    assert stuck.severity == "error"
    assert store.run_id in stuck.message
    assert "tokenmill janitor" in stuck.cure
    await client.set(ALIVE, "1")
    [going] = await examine_bulk(client)
    assert going.severity == "info"
    assert "0 of an unknown number settled" in going.message
    past = str((await store.view()).now_ms - QUIET_MS - 1000)
    await client.hset(
        store.keys.record, mapping={"updated_ms": past, "created_ms": past}
    )
    [silent] = await examine_bulk(client)
    assert silent.severity == "warning"
    assert "5 minutes" in silent.message


async def test_a_document_of_several_megabytes_is_divided_off_the_loop(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
):
    jobs = Jobs(client)
    await jobs.publish()
    text = "\n\n".join(
        f"Paragraph {number} has some words. " * 20 for number in range(4000)
    )
    assert len(text) > 2_300_000
    threads: list[str] = []

    def divided(*args: object) -> object:
        threads.append(threading.current_thread().name)
        return divide(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(plans, "divide", divided)
    store = RunStore(client, new_run_id(), keep_ms=60_000)
    await store.create(RunSpec(kind="summarize", model=MODEL))
    await store.feed([Item(seq=0, document=Document(text))])
    pool = BulkPool(client, Config())
    await wait_until(lambda: _opened(pool, store))
    view = await store.view()
    assert view.windows > 1100
    assert view.open_jobs >= 256
    assert [name.partition("_")[0] for name in threads] == ["bulk"]


async def _opened(pool: BulkPool, store: RunStore) -> bool:
    """A pass does not wait for the division, and finds it when it is done."""
    await advance(pool, store.run_id)
    return bool((await store.view()).open_jobs)


async def test_events_of_jobs_that_nobody_waits_for_shorten_their_life(
    client: "redis.asyncio.Redis",
):
    jobs = Jobs(client)
    await jobs.publish()
    store = await _fed(client)
    pool = BulkPool(client, Config())
    await advance(pool, store.run_id)
    [job_id] = await jobs.wait_for(1)
    await pool.writes(store.run_id).forget([job_id])
    await jobs.end(job_id)
    keys = Keys(MODEL, 0)
    await DoneReader(client, [on_done(pool)], bell=BELL).step()

    async def short() -> bool:
        return 0 < await client.pttl(keys.job(job_id)) <= 60_000

    await wait_until(short)
