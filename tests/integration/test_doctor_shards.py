"""What `doctor` says of a shard: engines' counters, and jobs that nobody dispatches."""

import msgspec
import pytest

from tokenmill.shared.config import Config
from tokenmill.shared.keys import JobId, Keys, new_unique
from tokenmill.shared.messages import JobRequest, encode
from tokenmill.shared.pool import shard_checks
from tokenmill.shared.pool.shard_checks import examine_shard, findings_of
from tokenmill.shared.script_types import EngineCounters, GroupInfo
from tokenmill.shared.scripts import NewJob, Scripts
from tokenmill.shared.versions import Versions

KEYS = Keys("m", 0)
GROUP = GroupInfo(
    group="w-1",
    total_blocks=100,
    max_running=8,
    batch_tokens=1000,
    block_size=8,
    max_context=800,
    weights_version="v",
    counters=EngineCounters(free_blocks=90, num_running=2, steps=7),
)


@pytest.fixture
async def shard(redis_client, monkeypatch) -> Scripts:
    """A shard with a worker, an active scheduler and one job that waits."""
    monkeypatch.setattr(shard_checks, "STILL_MS", 0)
    monkeypatch.setattr(shard_checks, "_WATCH_S", 0.01)
    scripts = Scripts(redis_client, KEYS)
    await scripts.acquire_scheduler("s-1", 60_000)
    await scripts.register_group("w-1", GROUP, ttl_ms=60_000)
    job = NewJob(
        id=JobId("m", 0, new_unique()),
        payload=encode(JobRequest(text="abc")),
        payload_hash="h",
        job_class="interactive",
        tenant="default",
        bucket="128",
        tokens=3,
        max_tokens=4,
        seed=1,
        keep_ms=60_000,
    )
    (reply,) = await scripts.enqueue([job])
    assert reply.status == "queued"
    return scripts


async def look(scripts: Scripts) -> dict[str, object]:
    found = await examine_shard(scripts._redis, KEYS.shard, Config())
    return {one.name: one for one in found}


async def test_jobs_that_wait_beside_free_room_are_a_warning(shard) -> None:
    found = (await look(shard))["dispatch m:0"]
    assert found.severity == "warning"
    assert "1 jobs wait" in found.message
    assert "scheduler" in found.cure


async def test_room_of_a_version_without_a_share_is_none(shard) -> None:
    await Versions(shard._redis, "m").fix({"v2": 100})
    assert "dispatch m:0" not in await look(shard)


async def test_jobs_that_wait_for_room_are_no_fault(shard) -> None:
    await shard._redis.hset(KEYS.group("w-1"), "credit_running", 0)
    assert "dispatch m:0" not in await look(shard)


async def test_jobs_that_came_just_now_are_no_fault(shard, monkeypatch) -> None:
    monkeypatch.setattr(shard_checks, "STILL_MS", 60_000)
    assert "dispatch m:0" not in await look(shard)


async def test_without_a_scheduler_that_is_the_fault(shard) -> None:
    await shard.release_scheduler("s-1")
    found = await look(shard)
    assert found["scheduler m:0"].severity == "error"
    assert "dispatch m:0" not in found


async def test_an_engines_counters_are_shown(shard) -> None:
    found = await look(shard)
    assert found["engine w-1"].severity == "info"
    assert "90 of 100 blocks free, 2 of 8 running" in found["engine w-1"].message
    assert "7 steps" in found["steps w-1"].message
    assert all(len(one.message) < 200 for one in found.values())


def test_memory_is_shown_as_what_it_is_worth() -> None:
    counted = EngineCounters(
        free_blocks=60, pool_blocks=100, cached_blocks=20,
        allocated_tokens=320, used_tokens=316,
        prefix_tokens_asked=50, prefix_tokens_hit=40,
        preemptions=3, out_of_memory=2,
    )  # fmt: skip
    overcommitted = msgspec.structs.replace(GROUP, total_blocks=150, counters=counted)
    load, _steps, memory = findings_of(overcommitted)
    message = memory.message
    assert "60 of 100 blocks free" in load.message
    assert "20 free blocks keep a prefix, 80.0 % of prompts came from there" in message
    assert "1.2 % of KV in use is waste" in message
    assert "3 preemptions, 2 steps halved" in message


def test_overruns_are_a_warning_with_a_cure() -> None:
    overrun = EngineCounters(overruns=3)
    found, *_ = findings_of(msgspec.structs.replace(GROUP, counters=overrun))
    assert found.severity == "warning"
    assert "3 overruns" in found.message
    assert found.cure


def test_the_use_of_the_pool_is_shown() -> None:
    counted = EngineCounters(
        cached_blocks=12,
        allocated_tokens=1000,
        used_tokens=985,
        preemptions=4,
        prefix_tokens_asked=200,
        prefix_tokens_hit=150,
    )
    *_, found = findings_of(msgspec.structs.replace(GROUP, counters=counted))
    assert found.severity == "info"
    for told in ("75.0 % of prompts", "1.5 % of KV", "4 preemptions"):
        assert told in found.message


def test_steps_halved_for_want_of_memory_are_a_warning_with_a_cure() -> None:
    halved = EngineCounters(out_of_memory=2)
    *_, found = findings_of(msgspec.structs.replace(GROUP, counters=halved))
    assert found.severity == "warning"
    assert "2 steps halved" in found.message
    assert "kv_memory_mb" in found.cure
