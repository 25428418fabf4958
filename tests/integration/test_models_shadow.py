"""Shadow traffic: what is copied, what never is, and how it is bounded."""

import asyncio

import msgspec
import pytest
from support.fake_group import FakeGroup, card

from tokenmill import Client, Prompt
from tokenmill.producer.models.cli_tables import print_report
from tokenmill.scheduler import shadow as module
from tokenmill.scheduler.events import DoneEvent, DoneReader
from tokenmill.scheduler.shadow import Shadow
from tokenmill.scheduler.shadow_compare import compare, sample_of
from tokenmill.scheduler.shadow_copy import MOST_BYTES
from tokenmill.shared.bulk.keys import BELL
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.keys import MODELS
from tokenmill.shared.messages import (
    DEFAULT_MODEL,
    AdapterRef,
    Choice,
    FinishReason,
    JobRequest,
    JobResult,
    Sampling,
    Timings,
    encode,
)
from tokenmill.shared.shadow_keys import SHADOW_TENANT, shadow_key, source_key
from tokenmill.shared.shadow_report import read_report
from tokenmill.shared.version_life import VersionLife
from tokenmill.shared.versions import VersionSpec

MODEL = DEFAULT_MODEL


@pytest.fixture
async def copying(empty_redis):
    """A served model whose v2 gets all of its traffic copied."""
    async with FakeGroup(empty_redis) as group:
        versions = VersionLife(empty_redis, MODEL, 1).versions
        await versions.fix({"v1": 100.0})
        model = ModelConfig(name=MODEL, version="v2")
        await versions.add(VersionSpec(version="v2", model=model, state="ready"))
        await versions.shadow("v2", 100.0)
        await empty_redis.hset(MODELS, MODEL, encode(card(MODEL)))
        yield group


async def ended(client, group, mill, *prompts: Prompt) -> list[str]:
    """Ids of jobs that v1 has served."""
    jobs = [await mill.submit(prompt) for prompt in prompts]
    for job in jobs:
        result = await job.result(timeout=60)
        made = msgspec.structs.replace(result, version="v1")
        await client.set(group.keys.output(job.id), encode(made), keepttl=True)
    return [job.id for job in jobs]


async def copies(client, group) -> list[dict[bytes, bytes]]:
    names = await client.zrange(group.keys.recent, 0, -1)
    rows = [await client.hgetall(group.keys.job(name.decode())) for name in names]
    return [row for row in rows if row[b"tenant"] == SHADOW_TENANT.encode()]


async def test_jobs_are_copied_once_as_quiet_bulk_jobs(copying, empty_redis) -> None:
    shadow = Shadow(empty_redis)
    await shadow.look()
    assert shadow.wants(copying.keys)
    async with Client(str(_url(empty_redis))) as mill:
        await copying.pause()
        copying.serving.set()
        ids = await ended(
            empty_redis, copying, mill, Prompt("one two", model=MODEL, tenant="t")
        )
        await copying.pause()
        event = DoneEvent(id=ids[0], state="succeeded", tenant="t")
        await shadow.on_done(copying.keys, [event])
        await shadow.on_done(copying.keys, [event])
    (made,) = await copies(empty_redis, copying)
    source = await empty_redis.hgetall(copying.keys.job(ids[0]))
    assert made[b"class"] == b"bulk"
    assert made[b"priority"] == b"100"
    assert made[b"version"] == b"v2"
    assert made[b"v"] == b"3"
    assert made[b"seed"] == source[b"seed"]
    assert b"webhook" not in made
    report = await read_report(empty_redis, MODEL, "v2")
    assert (report.copied, report.skipped) == (1, 0)
    assert await empty_redis.ttl(shadow_key(MODEL, "v2")) > 0


def _url(client) -> str:
    options = client.connection_pool.connection_kwargs
    return f"redis://{options['host']}:{options['port']}/{options.get('db') or 0}"


async def test_what_is_no_traffic_of_users_is_not_copied(copying, empty_redis) -> None:
    shadow = Shadow(empty_redis)
    await shadow.look()
    async with Client(_url(empty_redis)) as mill:
        (mine,) = await ended(empty_redis, copying, mill, Prompt("a", model=MODEL))
        await copying.pause()
        events = [
            DoneEvent(id=mine, state="failed", tenant="default"),
            DoneEvent(id=mine, state="succeeded", tenant=SHADOW_TENANT),
        ]
        await shadow.on_done(copying.keys, events)
        result = await empty_redis.get(copying.keys.output(mine))
        own = msgspec.json.decode(result, type=JobResult)
        served = encode(msgspec.structs.replace(own, version="v2"))
        await empty_redis.set(copying.keys.output(mine), served)
        await shadow.on_done(
            copying.keys, [DoneEvent(id=mine, state="succeeded", tenant="default")]
        )
    assert await copies(empty_redis, copying) == []
    report = await read_report(empty_redis, MODEL, "v2")
    assert (report.skipped, report.skipped_by_reason) == (1, {"served_it": 1})


async def test_copies_are_bounded_in_number_and_rate(
    copying, empty_redis, monkeypatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    shadow = Shadow(empty_redis)
    await shadow.look()
    async with Client(_url(empty_redis)) as mill:
        prompts = [Prompt(f"p {n}", model=MODEL) for n in range(8)]
        ids = await ended(empty_redis, copying, mill, *prompts)
        await copying.pause()
        for name in ids:
            event = DoneEvent(id=name, state="succeeded", tenant="default")
            await shadow.on_done(copying.keys, [event])
    assert len(await copies(empty_redis, copying)) == 3
    report = await read_report(empty_redis, MODEL, "v2")
    assert (report.skipped, report.skipped_by_reason) == (5, {"waiting": 5})
    assert shadow._take_allowance(10_000) <= module.BURST


async def test_the_reader_gives_all_events_only_where_copies_are_made(
    copying, empty_redis
) -> None:
    heard: list[str] = []

    async def hear(_keys, events) -> None:
        heard.extend(event.id for event in events)

    shadow = Shadow(empty_redis)
    reader = DoneReader(empty_redis, [hear], bell=BELL, takes_all=shadow.wants)
    async with Client(_url(empty_redis)) as mill:
        await ended(empty_redis, copying, mill, Prompt("a", model=MODEL))
        await reader.step()
        assert heard == []
        await shadow.look()
        ids = await ended(empty_redis, copying, mill, Prompt("b", model=MODEL))
        await reader.step()
        assert heard == ids


def result(tokens: tuple[int, ...], *times: float | None) -> JobResult:
    choice = Choice(
        index=0, text="", token_ids=tokens, finish_reason=FinishReason.LENGTH
    )
    queued, first, total = times or (None, None, None)
    timings = Timings(queued_ms=queued, ttft_ms=first, total_ms=total)
    return JobResult(
        id="j", state="succeeded", model=MODEL, choices=(choice,), timings=timings
    )


def test_a_comparison_counts_tokens_and_the_time_on_the_worker() -> None:
    sample = sample_of(
        result((1, 2, 3, 4), 10.0, 15.0, 40.0), result((1, 2, 9), 500.0, 507.0, 560.0)
    )
    assert (sample.exact, sample.prefix) == (False, 0.5)
    assert sample.ttft_ms == (5.0, 7.0)
    assert sample.total_ms == (30.0, 60.0)
    assert sample_of(result((1, 2)), result((1, 2))).exact


async def test_an_end_is_compared_once_and_failures_are_told(
    copying, empty_redis
) -> None:
    keys = copying.keys
    await empty_redis.hset(keys.job("copy"), "version", "v2")
    await empty_redis.set(keys.output("source"), encode(result((1, 2))))
    await empty_redis.set(keys.output("copy"), encode(result((1, 2))))
    event = DoneEvent(id="copy", state="succeeded", tenant=SHADOW_TENANT)
    for _ in range(2):
        await asyncio.gather(*(compare(empty_redis, keys, event) for _ in range(2)))
        await empty_redis.set(source_key("copy"), "source", ex=60, nx=True)
    await compare(
        empty_redis, keys, DoneEvent(id="copy", state="expired", tenant=SHADOW_TENANT)
    )
    report = await read_report(empty_redis, MODEL, "v2")
    assert (report.compared, report.failed, report.exact) == (1, 1, 1.0)
    assert "expired" in report.last_error


async def test_a_report_says_why_jobs_were_not_copied(
    copying, empty_redis, monkeypatch, capsys
) -> None:
    shadow = Shadow(empty_redis)
    await shadow.look()
    keys = copying.keys
    plain = JobRequest(text="a", sampling=Sampling(max_tokens=3))
    served = msgspec.structs.replace(result((1,)), version="v1")
    change = msgspec.structs.replace
    jobs = {
        "gone": (plain, None, ""),
        "pinned": (plain, served, "v1"),
        "adapter": (change(plain, adapter=AdapterRef("a", "0" * 64)), served, ""),
        "no_share": (plain, change(served, version="v3"), ""),
        "too_large": (change(plain, text="a" * MOST_BYTES), served, ""),
    }
    for name, (request, ended_as, pin) in jobs.items():
        await empty_redis.hset(keys.job(name), mapping={"seed": "1", "version": pin})
        await empty_redis.set(keys.input(name), encode(request))
        if ended_as is not None:
            await empty_redis.set(keys.output(name), encode(ended_as))
    events = [DoneEvent(id=name, state="succeeded", tenant="t") for name in jobs]
    await shadow.on_done(keys, events)
    monkeypatch.setattr(shadow, "_allowance", 0.0)
    monkeypatch.setattr(module, "PER_S", 0.0)
    await shadow.on_done(keys, events[:1])
    report = await read_report(empty_redis, MODEL, "v2")
    assert report.skipped_by_reason == {"rate": 1, **dict.fromkeys(jobs, 1)}
    print_report(report)
    printed = capsys.readouterr().out
    assert "not copied    6\n" in printed
    assert "              1 too many a second\n" in printed
