"""What `doctor` says of a shard: engines' counters, and jobs that nobody dispatches."""

import msgspec
import pytest

from tokenmill.shared.keys import JobId, Keys, new_unique
from tokenmill.shared.messages import JobRequest, encode
from tokenmill.shared.pool import shard_checks
from tokenmill.shared.pool.shard_checks import engine_of, examine_shard
from tokenmill.shared.script_types import EngineCounters, GroupInfo
from tokenmill.shared.scripts import Limits, NewJob, Scripts

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
    (reply,) = await scripts.enqueue([job], Limits())
    assert reply.status == "queued"
    return scripts


async def look(scripts: Scripts) -> dict[str, object]:
    found = await examine_shard(scripts._redis, KEYS.shard)
    return {one.name: one for one in found}


async def test_jobs_that_wait_beside_free_room_are_a_warning(shard) -> None:
    found = (await look(shard))["dispatch m:0"]
    assert found.severity == "warning"
    assert "1 jobs wait" in found.message
    assert "scheduler" in found.cure


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
    found = (await look(shard))["engine w-1"]
    assert found.severity == "info"
    assert "90 of 100 blocks free, 2 of 8 running" in found.message
    assert "7 steps" in found.message


def test_overruns_are_a_warning_with_a_cure() -> None:
    overrun = EngineCounters(overruns=3)
    found = engine_of(msgspec.structs.replace(GROUP, counters=overrun))
    assert found.severity == "warning"
    assert "3 overruns" in found.message
    assert found.cure
