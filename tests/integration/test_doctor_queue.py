"""What `doctor` says of a queue and of the store: limits, suspects, dead letters."""

import msgspec
import pytest

from tokenmill.shared.config import Config, StorageConfig
from tokenmill.shared.keys import POOL, SHARDS, JobId, Keys, new_unique
from tokenmill.shared.messages import JobRequest, PoolCard, encode
from tokenmill.shared.pool.doctor import examine
from tokenmill.shared.pool.queue_checks import examine_queue
from tokenmill.shared.pool.storage_check import examine_storage
from tokenmill.shared.script_types import GroupInfo, Limits, NewJob
from tokenmill.shared.scripts import Scripts

KEYS = Keys("m", 0)


@pytest.fixture
async def scripts(redis_client) -> Scripts:
    made = Scripts(redis_client, KEYS)
    await made.acquire_scheduler("s-1", 60_000)
    return made


def new_job(version: int = 1) -> NewJob:
    return NewJob(
        id=JobId("m", 0, new_unique()),
        payload=encode(JobRequest(v=version, text="abc")),
        payload_hash="h",
        job_class="interactive",
        tenant="default",
        bucket="128",
        tokens=3,
        max_tokens=4,
        seed=1,
        keep_ms=60_000,
        v=version,
    )


def group(schema: int = 1) -> GroupInfo:
    return GroupInfo(
        group="w-1",
        total_blocks=1,
        max_running=1,
        batch_tokens=1,
        block_size=8,
        max_context=8,
        weights_version="v",
        schema=schema,
    )


async def look(
    scripts: Scripts, *groups: GroupInfo, isolate_after: int = 2
) -> dict[str, object]:
    found = await examine_queue(scripts._redis, KEYS, groups, isolate_after)
    return {one.name.partition(" ")[0]: one for one in found}


async def test_limits_in_force_are_shown(scripts) -> None:
    assert (await look(scripts))["queue"].severity == "warning"
    await scripts.write_limits(Limits(max_waiting_jobs=77))
    await scripts.enqueue([new_job()])
    found = (await look(scripts))["queue"]
    assert found.severity == "info"
    assert "1 jobs and 3 tokens wait" in found.message
    assert "max_waiting_jobs 77" in found.message


async def test_dead_letters_are_a_warning_with_their_cause(scripts) -> None:
    assert (await look(scripts))["dead-letters"].severity == "info"
    await scripts._redis.xadd(KEYS.dead, {"reason": "it kills"})
    found = (await look(scripts))["dead-letters"]
    assert found.severity == "warning"
    assert "1 dead letters; the newest: it kills" in found.message
    assert "tokenmill dead" in found.cure


async def test_suspects_are_named(scripts) -> None:
    assert "suspects" not in await look(scripts)
    await scripts._redis.xadd(KEYS.resume, {"id": "m.0.x", "losses": "2"})
    found = (await look(scripts))["suspects"]
    assert "m.0.x" in found.message
    assert "suspects" not in await look(scripts, isolate_after=3)


@pytest.mark.parametrize(
    ("scheduler", "worker", "is_late"),
    [(1, 2, True), (2, 1, True), (2, 2, False), (3, 3, False)],
)
async def test_jobs_that_nobody_reads_are_named(
    scripts, scheduler, worker, is_late
) -> None:
    await scripts._redis.hset(KEYS.scheduler, "schema", str(scheduler))
    await scripts.enqueue([new_job(1), new_job(2), new_job(2)])
    found = (await look(scripts, group(worker)))["schema"]
    assert found.severity == ("warning" if is_late else "info")
    if is_late:
        assert "at least 2 jobs wait that have schema version 2" in found.message


async def test_the_store_is_tried(tmp_path) -> None:
    url = f"file://{tmp_path}/store"
    config = Config(storage=StorageConfig(url=url))
    card = PoolCard(storage_url=url)
    assert (await examine_storage(None, Config())).severity == "info"
    assert "writable" in (await examine_storage(card, config)).message
    other = PoolCard(storage_url="file:///elsewhere")
    assert (await examine_storage(other, config)).severity == "warning"
    (tmp_path / "file").write_text("in the way")
    broken = PoolCard(storage_url=f"file://{tmp_path}/file")
    found = await examine_storage(broken, Config())
    assert (found.severity, "mount" in found.cure) == ("error", True)


async def test_strange_shards_and_cards_stop_nothing(
    redis_client, redis_server
) -> None:
    await redis_client.sadd(SHARDS, "no shard", b"\xff:0", "m:0")
    found = {one.name: one for one in await examine(Config(), redis_server.url)}
    assert "queue m:0" in found
    await redis_client.set(POOL, encode(msgspec.structs.replace(PoolCard(), v=9)))
    found = {one.name: one for one in await examine(Config(), redis_server.url)}
    assert "schema version 9" in found["pool"].message
