"""Two versions of a model in one pool: who gets which job, and what a switch moves."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import redis.asyncio
from support.scheduled_pool import CARD, Pool, new_job, scheduling
from support.shard_client import KEYS, delta
from support.waiting import stays, wait_until

from tokenmill.shared.config import Config, SchedulerConfig
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.keys import MODELS, SHARDS, tokenizer_key
from tokenmill.shared.messages import JobRequest, Sampling, encode
from tokenmill.shared.scripts import EmitItem, NewJob, Started
from tokenmill.shared.tokens import ids_from_bytes
from tokenmill.shared.version_keys import cards_key
from tokenmill.shared.versions import Versions, VersionSpec

SOON_S = 0.3
"""Several ticks of the scheduler: by then it has given what it gives."""


class TwoVersions(Pool):
    """A queue with groups `a` of v1 and `b` of v2."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        super().__init__(client)
        self.versions = Versions(client, "tiny")
        self.cursors: dict[str, bytes] = {}

    async def work(self, count: int, group: str = "a") -> list[Started]:
        """As in a pool of one group; each has a cursor of its own."""
        self.cursor = self.cursors.get(group, b"0")
        started = await super().work(count, group)
        self.cursors[group] = self.cursor
        return started

    async def both(self, **shares: float) -> None:
        await self.group("a", version="v1", weights_version="w1")
        await self.group("b", version="v2", weights_version="w2")
        if shares:
            await self.share(**shares)

    async def share(self, **shares: float) -> None:
        await self.versions.fix({"v1": 100})
        for name in ("v1", "v2"):
            spec = VersionSpec(
                version=name, model=ModelConfig(name="tiny", version=name)
            )
            await self.versions.add(spec, replace=True)
            await self.versions.set_state(name, "ready")
        await self.versions.switch(shares)

    async def queued(self, count: int) -> None:
        """Waits until the scheduler has looked, and so many jobs are left waiting."""

        async def left() -> bool:
            load = await self.scripts.load()
            return int(load.get("jobs", 0)) == count

        await wait_until(left, what=f"{count} waiting jobs")
        await stays(left, SOON_S, what=f"{count} waiting jobs")

    async def emit(self, started: Started, group: str) -> None:
        item = EmitItem(started.job_id, started.epoch, 1, delta(0))
        assert await self.scripts.emit(group=group, items=[item]) == ["written"]


def pinned(version: str, text: str = "hello", **fields: object) -> NewJob:
    request = JobRequest(
        v=3, text=text, version=version, sampling=Sampling(max_tokens=5)
    )
    return new_job(text, payload=encode(request), version=version, v=3, **fields)


@pytest.fixture
async def pool(
    empty_redis: "redis.asyncio.Redis",
) -> AsyncIterator[TwoVersions]:
    pool = TwoVersions(empty_redis)
    async with scheduling(empty_redis):
        yield pool


async def test_a_pin_is_kept_with_and_without_a_route(pool: TwoVersions) -> None:
    await pool.both()
    [first] = await pool.enqueue(pinned("v2"))
    [started] = await pool.work(1, "b")
    assert started.job_id == first
    await pool.share(v1=100)
    [second, third] = await pool.enqueue(pinned("v2"), pinned("v1"))
    assert [s.job_id for s in await pool.work(1, "b")] == [second]
    assert [s.job_id for s in await pool.work(1, "a")] == [third]


async def test_a_version_without_a_share_gets_only_what_is_for_it(
    pool: TwoVersions,
) -> None:
    await pool.both(v1=100)
    ids = await pool.enqueue(*(new_job(f"job {n}") for n in range(8)))
    assert sorted(s.job_id for s in await pool.work(8, "a")) == sorted(ids)
    # Full, though the other has nothing to do.
    await pool.enqueue(new_job("one more"))
    await pool.queued(1)


async def test_a_switch_moves_new_jobs_and_a_rollback_moves_them_back(
    pool: TwoVersions,
) -> None:
    await pool.both(v1=100)
    await pool.enqueue(new_job())
    await pool.work(1, "a")
    await pool.versions.switch({"v2": 100})
    await pool.enqueue(new_job())
    [moved] = await pool.work(1, "b")
    await pool.emit(moved, "b")
    record = await pool.scripts.job(moved.job_id)
    assert record is not None
    assert (record["served"], record["weights"]) == ("v2", "w2")
    await pool.versions.rollback()
    await pool.enqueue(new_job())
    await pool.work(1, "a")


async def test_percentages_split_by_the_id(pool: TwoVersions) -> None:
    await pool.both(v1=50, v2=50)
    jobs = [new_job(f"job {n}") for n in range(10)]
    route = await pool.versions.route()
    assert route is not None
    mine = {str(job.id): route.version_of(str(job.id)) for job in jobs}
    for name in ("a", "b"):
        await pool.group(name, version="v1" if name == "a" else "v2", max_running=64)
    await pool.enqueue(*jobs)
    for name, version in (("a", "v1"), ("b", "v2")):
        expected = sorted(j for j, v in mine.items() if v == version)
        started = await pool.work(len(expected), name) if expected else []
        assert sorted(s.job_id for s in started) == expected


async def test_a_started_job_waits_for_its_weights_and_goes_on_there(
    pool: TwoVersions,
) -> None:
    """Its version has lost its share, and its worker dies and comes back."""
    await pool.both(v1=100)
    [job_id] = await pool.enqueue(new_job())
    [started] = await pool.work(1, "a")
    await pool.emit(started, "a")
    await pool.versions.switch({"v2": 100})
    await pool.scripts.forfeit("a", "it died", counts=False)
    await pool.queued(1)
    await pool.group("a2", version="v1", weights_version="w1")
    [again] = await pool.work(1, "a2")
    assert (again.job_id, again.weights, len(again.log)) == (job_id, "w1", 1)


async def test_where_a_share_has_no_group_the_others_get_its_jobs(
    pool: TwoVersions,
) -> None:
    await pool.group("a", version="v1", max_running=64)
    await pool.share(v1=50, v2=50)
    ids = await pool.enqueue(*(new_job(f"job {n}") for n in range(8)))
    assert sorted(s.job_id for s in await pool.work(8, "a")) == sorted(ids)


async def test_jobs_that_wait_for_a_version_hold_up_nobody(
    empty_redis: "redis.asyncio.Redis",
) -> None:
    """They stand first in the same lane, more of them than are read ahead."""
    pool = TwoVersions(empty_redis)
    few = SchedulerConfig(leader_lease_ms=300, read_ahead=4)
    await pool.group("a", version="v1", max_running=8)
    await pool.enqueue(*(pinned("v2", f"lost {n}") for n in range(12)))
    async with scheduling(empty_redis, Config(scheduler=few)):
        ids = await pool.enqueue(*(new_job(f"job {n}") for n in range(5)))
        assert sorted(s.job_id for s in await pool.work(5, "a")) == sorted(ids)
        await pool.queued(12)
        await pool.group("b", version="v2", max_running=16)
        assert len(await pool.work(12, "b")) == 12


async def test_a_candidate_changes_nothing_for_producers(pool: TwoVersions) -> None:
    card = {name: msgspec.structs.replace(CARD) for name in ("v1", "v2")}
    card["v2"] = msgspec.structs.replace(
        CARD, max_context=50, vocab_size=300, weights_version="w2"
    )
    await pool.scripts.publish_card("v1", card["v1"])
    await pool.share(v1=100)

    async def shown() -> tuple[int, int, str]:
        raw = await pool.client.hget(MODELS, "tiny")
        found = msgspec.json.decode(raw, type=type(CARD))
        return found.max_context, found.vocab_size, found.weights_version

    await pool.client.hset(
        MODELS, "tiny", encode(msgspec.structs.replace(CARD, bytes_per_token=4.5))
    )
    before = await pool.client.hget(MODELS, "tiny")
    await pool.scripts.publish_card("v2", card["v2"])
    assert await pool.client.hget(MODELS, "tiny") == before
    # What both can do while both have a share; then what the one can.
    await pool.versions.switch({"v1": 99, "v2": 1})
    assert await shown() == (50, 257, "w1")
    assert b'"bytes_per_token":4.5' in await pool.client.hget(MODELS, "tiny")
    await pool.versions.switch({"v2": 100})
    assert await shown() == (50, 300, "w2")
    await pool.versions.rollback()
    await pool.versions.switch({"v1": 100})
    assert await shown() == (200, 257, "w1")


async def test_each_version_gets_prompts_in_its_own_tokens(
    pool: TwoVersions, tiny_bundle: tuple[str, bytes]
) -> None:
    name, bundle = tiny_bundle
    await pool.client.set(tokenizer_key(name), bundle)
    await pool.scripts.publish_card("v1", CARD)
    await pool.share(v1=100)
    other = msgspec.structs.replace(CARD, tokenizer=name, weights_version="w2")
    await pool.scripts.publish_card("v2", other)
    assert await pool.client.hlen(cards_key("tiny")) == 2
    await pool.group("a", version="v1", tokenizer="bytes", max_running=1)
    await pool.group("b", version="v2", tokenizer=name, weights_version="w2")
    text = "hello hello hello"
    await pool.enqueue(pinned("v2", text))
    [there] = await pool.work(1, "b")
    await pool.enqueue(new_job(text))
    [here] = await pool.work(1, "a")
    assert ids_from_bytes(here.token_ids) == list(text.encode())
    assert len(there.token_ids) < len(here.token_ids)
    # What waits when the route moves is encoded anew for where it goes.
    [moved] = await pool.enqueue(new_job(text))
    await pool.queued(1)
    await pool.versions.switch({"v2": 100})
    [again] = await pool.work(1, "b")
    assert (again.job_id, again.token_ids) == (moved, there.token_ids)


@pytest.fixture(scope="module")
def tiny_bundle() -> tuple[str, bytes]:
    """A tokenizer of whole words, as a worker would publish it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tokenmill.shared.tokens import load_tokenizer, pack_tokenizer

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    files = {
        "tokenizer.json": made.to_str().encode(),
        "tokenizer_config.json": msgspec.json.encode(
            {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
        ),
    }
    name, bundle = pack_tokenizer(files)
    load_tokenizer(bundle)  # the first of a process takes seconds
    return name, bundle


async def test_a_switch_that_no_worker_has_seen_yet_outlives_what_redis_loses(
    pool: TwoVersions, empty_redis: "redis.asyncio.Redis", monkeypatch
) -> None:
    """The scheduler looks more often than workers do."""
    await pool.both(v1=50, v2=50)
    await empty_redis.sadd(SHARDS, KEYS.shard)  # type: ignore[misc]
    seen = asyncio.Event()
    follow = Versions.follow

    async def watched(self: Versions) -> object:
        found = await follow(self)
        if found[0].shares == {"v1": 70.0, "v2": 30.0}:
            seen.set()
        return found

    monkeypatch.setattr(Versions, "follow", watched)
    await pool.versions.switch({"v1": 70, "v2": 30})
    await asyncio.wait_for(seen.wait(), 60)
    await empty_redis.flushall()

    async def back() -> bool:
        route, specs = await pool.versions.read()
        return route.shares == {"v1": 70, "v2": 30} and set(specs) == {"v1", "v2"}

    await wait_until(back, what="the newest route again")
