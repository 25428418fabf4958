"""Pins and served versions from a prompt to what people see; what doctor says."""

import asyncio
import json

import pytest
from support.fake_group import FakeGroup, card
from support.shard_client import KEYS, Shard, group_info
from typer.testing import CliRunner

from tokenmill import Client, Prompt
from tokenmill.__main__ import build_app
from tokenmill.producer import pool_view
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import IdempotencyConflict, InvalidBatch, InvalidRequest
from tokenmill.shared.messages import (
    DEFAULT_MODEL,
    PIN_VERSION,
    JobRequest,
    PoolCard,
)
from tokenmill.shared.new_job import new_job
from tokenmill.shared.pool.queue_checks import examine_queue
from tokenmill.shared.redis import Finding
from tokenmill.shared.version_restoring import restored
from tokenmill.shared.versions import Versions, VersionSpec


@pytest.fixture
async def mill(newest_redis, empty_redis):
    async with Client(newest_redis.url, patience_s=5) as client:
        yield client


async def test_a_pin_to_a_version_that_nobody_has_is_refused(mill, empty_redis) -> None:
    async with FakeGroup(empty_redis):
        with pytest.raises(InvalidRequest, match="no version 'v9'; it has: v1") as bad:
            await mill.submit(Prompt("hello", version="v9"))
        assert bad.value.field == "version"
        with pytest.raises(InvalidRequest, match="cannot be a version's name"):
            await mill.submit(Prompt("hello", version="a b"))
        # A registered one is known though no worker of it lives yet.
        model = ModelConfig(name=DEFAULT_MODEL, version="v9")
        spec = VersionSpec(version="v9", model=model)
        await Versions(empty_redis, DEFAULT_MODEL).add(spec)
        job = await mill.submit(Prompt("hello", version="v9"))
        assert (await job.info()).pinned_version == "v9"


async def test_a_version_that_drains_takes_no_new_jobs(
    mill, empty_redis, monkeypatch
) -> None:
    monkeypatch.setattr(pool_view, "LIFE_AGE_S", 0.0)
    model = ModelConfig(name=DEFAULT_MODEL, version="v9")
    versions = Versions(empty_redis, DEFAULT_MODEL)
    await versions.fix({"v1": 100})
    await versions.add(VersionSpec(version="v9", model=model, state="ready"))
    async with FakeGroup(empty_redis):
        await mill.submit(Prompt("hello", version="v9"))
        await versions.drain("v9")
        took_back = f"models load {DEFAULT_MODEL} v9` takes it back"
        with pytest.raises(InvalidRequest, match=took_back) as refused:
            await mill.submit(Prompt("hello", version="v9"))
        assert refused.value.field == "version"
        with pytest.raises(InvalidBatch):
            await mill.submit_many([Prompt("hello", version="v9"), Prompt("hello")])
        await mill.submit(Prompt("hello"))
        await versions.set_state("v9", "ready", only_from=("draining",))
        await mill.submit(Prompt("hello", version="v9"))
    await versions.drain("v9")
    seen, specs = await versions.read()
    assert seen.draining == ("v9",)
    await empty_redis.flushall()
    await versions.change(restored(seen))
    assert (await versions.read())[0].draining == ()  # it comes with its version
    await versions.add(specs["v9"])
    assert (await versions.read())[0].draining == ("v9",)
    await versions.remove("v9")
    assert (await versions.read())[0].draining == ()


async def test_people_see_which_version_served_a_job(
    mill, empty_redis, newest_redis
) -> None:
    async with FakeGroup(empty_redis):
        job = await mill.submit(Prompt("hello", version="v1"))
        await job.result(timeout=60)
        info = await job.info()
    assert (info.version, info.pinned_version) == ("v1", "v1")
    words = ["show", job.id, "--url", newest_redis.url]
    shown = await asyncio.to_thread(CliRunner().invoke, build_app(), words)
    assert "version       v1 (only v1)" in shown.output


def test_only_a_pinned_request_is_of_version_3() -> None:
    plain, pool = card(), PoolCard()
    free = new_job(Prompt("hello"), plain, pool)
    bound = new_job(Prompt("hello", version="v2"), plain, pool)
    assert (free.v, free.version, bound.v, bound.version) == (
        1,
        None,
        PIN_VERSION,
        "v2",
    )
    assert free.payload_hash != bound.payload_hash
    request = json.loads(bound.payload)
    assert (request["v"], request["version"]) == (3, "v2")
    assert JobRequest().version is None


async def test_the_same_key_for_another_version_is_a_conflict(
    mill, empty_redis
) -> None:
    async with FakeGroup(empty_redis):
        await mill.submit(Prompt("hello", idempotency_key="k"))
        with pytest.raises(IdempotencyConflict):
            await mill.submit(Prompt("hello", idempotency_key="k", version="v1"))


@pytest.mark.parametrize("version", ["", "-x", "a" * 33, "a b", 7])
async def test_the_script_refuses_a_pin_that_is_no_name(shard: Shard, version) -> None:
    from support.shard_client import new_job as scripted

    (reply,) = await shard.scripts.enqueue([scripted(version=version or " ")])
    assert reply.status == "invalid"
    assert reply.detail.startswith("version:")


async def test_a_requeued_dead_letter_keeps_its_pin(shard: Shard, newest_redis) -> None:
    await shard.scripts.register_group("g1", group_info("g1", schema=3), 60_000)
    job_id = await shard.enqueue(version="v2", v=3)
    epoch = await shard.run_again(job_id)
    assert await shard.fail(job_id, epoch, max_attempts=1) == "failed"
    async with Client(newest_redis.url) as client:
        (made,) = await client.requeue((await client.dead_letters())[0].id)
    record = await shard.scripts.job(made.job)
    assert record is not None
    assert (record["version"], record["v"]) == ("v2", "3")


async def test_the_version_is_written_with_the_first_token(shard: Shard) -> None:
    await shard.scripts.register_group("g2", group_info("g2", version="v2"), 60_000)
    job_id, epoch = await shard.run("g2")
    assert "served" not in (await shard.scripts.job(job_id) or {})
    await shard.emit(job_id, epoch, 1, 0, "g2")
    assert (await shard.scripts.job(job_id) or {})["served"] == "v2"
    info = {g.group: g for g in await shard.scripts.groups()}["g2"]
    assert (info.version, info.tokenizer) == ("v2", "")


async def said(shard: Shard, *groups) -> list[Finding]:
    found = await examine_queue(shard.client, KEYS, groups, 2)
    return [one for one in found if one.name.startswith("versions")]


async def test_doctor_names_what_waits_for_a_version(shard: Shard) -> None:
    old = group_info("g1", version="v1", weights_version="w1")
    await shard.enqueue()
    assert await said(shard, old) == []
    job_id = await shard.enqueue(version="v2", v=3)
    (finding,) = await said(shard, old)
    assert finding.severity == "warning"
    assert f"{job_id} waits for version v2" in finding.message
    new = group_info("g2", version="v2", weights_version="w2")
    assert [one.severity for one in await said(shard, old, new)] == ["info"]


async def test_doctor_names_shares_that_nobody_serves(shard: Shard) -> None:
    versions = Versions(shard.client, KEYS.model)
    await versions.fix({"v1": 100})
    for name in ("v2", "v3"):
        model = ModelConfig(name=KEYS.model, version=name)
        await versions.add(VersionSpec(version=name, model=model))
    await versions.set_state("v2", "ready")
    await versions.set_state("v3", "failed", reason="it does not load")
    await versions.switch({"v1": 75, "v2": 25})
    old = group_info("g1", version="v1")
    found = await said(shard, old)
    assert [one.severity for one in found] == ["info", "warning", "warning"]
    assert "v1 75 %, v2 25 %" in found[0].message
    assert "no live worker of v2" in found[1].message
    assert "jobs go to v1" in found[1].message
    assert "it does not load" in found[2].message
    nobody = await said(shard)
    assert ("error", True) in [(f.severity, "jobs wait" in f.message) for f in nobody]
