"""Jobs with adapters through queue, scheduler and worker, without a model."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from support.adapter_pool import CONFIG, MODEL, working
from support.plain_adapters import save_plain_adapter
from support.scheduled_pool import KEYS, Pool, scheduling
from support.waiting import ticks, wait_until
from typer.testing import CliRunner

from tokenmill import Client, Prompt, Sampling
from tokenmill.__main__ import build_app
from tokenmill.producer.adapters import asking, fitting
from tokenmill.shared.adapter_keys import check_key, verdict_key
from tokenmill.shared.adapters import AdapterCheck, AdapterVerdict
from tokenmill.shared.adapters_registry import AdapterRegistry
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import (
    InvalidRequest,
    JobCancelled,
    JobFailed,
    ModelUnavailable,
    RedisUnavailable,
    UnknownAdapter,
    VersionConflict,
)
from tokenmill.shared.messages import encode
from tokenmill.shared.outage import Outage
from tokenmill.shared.versions import Versions, VersionSpec
from tokenmill.workers import adapters_start
from tokenmill.workers.adapters_check import AdapterChecks
from tokenmill.workers.adapters_echo import echo_adapters
from tokenmill.workers.engine.adapters.cache import AdapterCache
from tokenmill.workers.engine.adapters.checkpoint import AdapterFacts


@pytest.fixture
def held() -> AdapterCache:
    return echo_adapters(1 << 20, 16)


@pytest.fixture
async def mill(empty_redis, newest_redis, held) -> AsyncIterator[Client]:
    async with (
        scheduling(empty_redis, CONFIG),
        working(empty_redis, held),
        Client(newest_redis.url) as client,
    ):
        yield client


def asked(text: str = "hello", adapter: str | None = "tone", **more: object) -> Prompt:
    return Prompt(
        text, model=MODEL, adapter=adapter, sampling=Sampling(max_tokens=64), **more
    )


async def answer(mill: Client, prompt: Prompt) -> str:
    return (await (await mill.submit(prompt)).result(timeout=60)).text


async def test_an_adapter_is_registered_used_listed_and_removed(
    mill, held, tmp_path, newest_redis
) -> None:
    path = save_plain_adapter(tmp_path / "tone")
    card = await mill.add_adapter("tone", path, model=MODEL)
    assert (card.rank, card.alpha, card.base) == (4, 8.0, "echo")
    assert card.targets == ("q_proj",)
    result = await (await mill.submit(asked())).result(timeout=60)
    assert result.text == "tone: hello"
    assert result.adapter == card.ref
    assert await answer(mill, asked(adapter=None)) == "hello"
    for adapter in ("tone", None):
        job = await mill.submit(asked(adapter=adapter))
        words = ["show", job.id, "--url", newest_redis.url]  # ended or not
        shown = await asyncio.to_thread(CliRunner().invoke, build_app(), words)
        named = f"tone ({card.digest[:12]})" if adapter else "-"
        assert f"adapter       {named}\n" in shown.output
    by_model = Prompt("hello", model="echo:tone", sampling=Sampling(max_tokens=64))
    assert await answer(mill, by_model) == "tone: hello"
    assert held.stats().loads == 1
    await wait_until(lambda: held.stats().leased == 0, what="its adapter let go")
    assert [one.name for one in await mill.adapters()] == ["tone"]
    await mill.remove_adapter("tone", model=MODEL)
    await wait_until(lambda: _is_unknown(mill))
    assert await answer(mill, asked(adapter=None)) == "hello"


async def _is_unknown(mill: Client) -> bool:
    try:
        await mill.submit(asked())
    except UnknownAdapter as error:
        return "it has none" in str(error)
    return False


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"rank": 17}, "rank 17"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "dora"),
    ],
)
async def test_a_bad_adapter_is_refused_by_name_and_never_seen(
    mill, tmp_path, settings, wrong
) -> None:
    path = save_plain_adapter(tmp_path / "bad", **settings)
    with pytest.raises(InvalidRequest, match=rf"(?i)'bad' is refused.*{wrong}"):
        await mill.add_adapter("bad", path, model=MODEL)
    with pytest.raises(InvalidRequest, match=r"adapter_config.json cannot be read"):
        await mill.add_adapter("bad", tmp_path / "nothing", model=MODEL)
    assert await mill.adapters() == []


async def test_files_that_are_missing_or_changed_fail_that_job_alone(
    mill, tmp_path
) -> None:
    gone = save_plain_adapter(tmp_path / "gone")
    changed = save_plain_adapter(tmp_path / "changed")
    await mill.add_adapter("gone", gone, model=MODEL)
    await mill.add_adapter("changed", changed, model=MODEL)
    shutil.rmtree(gone)
    save_plain_adapter(changed, value=2.0)
    jobs = await mill.submit_many(
        [asked(adapter="gone"), asked(adapter="changed"), asked(adapter=None)]
    )
    for job, why in zip(jobs[:2], ("cannot be read", "has changed since"), strict=True):
        with pytest.raises(JobFailed, match=why) as caught:
            await job.result(timeout=60)
        assert caught.value.error_code == "adapter_unavailable"
    assert (await jobs[2].result(timeout=60)).text == "hello"


async def test_what_waits_fails_when_its_adapter_is_removed_what_runs_goes_on(
    empty_redis, newest_redis, held, tmp_path
) -> None:
    path = save_plain_adapter(tmp_path / "tone")
    long = Sampling(max_tokens=150, ignore_eos=True)
    async with scheduling(empty_redis, CONFIG), Client(newest_redis.url) as mill:
        async with working(empty_redis, held, step_ms=5):
            await mill.add_adapter("tone", path, model=MODEL)
            runs = await mill.submit(
                Prompt("ab", model=MODEL, adapter="tone", sampling=long)
            )
            await wait_until(lambda: _has_begun(mill, runs.id))
        # It was handed back in mid-stream; another one waits beside it.
        waits = await mill.submit(asked(), when_unserved="wait")
        await mill.remove_adapter("tone", model=MODEL)
        async with working(empty_redis, echo_adapters(1 << 20, 16)):
            result = await runs.result(timeout=60)
            assert result.usage.completion_tokens == 150
            assert result.text.startswith("tone: abtone: ab")
            with pytest.raises(JobFailed, match=r"was removed before the job began"):
                await waits.result(timeout=60)


async def _has_begun(mill: Client, job_id: str) -> bool:
    info = await mill.job(job_id).info()
    return info.first_token_ms is not None


async def test_a_replaced_adapter_serves_those_that_name_it(
    empty_redis, newest_redis, tmp_path
) -> None:
    first = save_plain_adapter(tmp_path / "first")
    second = save_plain_adapter(tmp_path / "second", value=2.0)
    async with scheduling(empty_redis, CONFIG), Client(newest_redis.url) as mill:
        async with working(empty_redis, echo_adapters(1 << 20, 16)):
            old = await mill.add_adapter("tone", first, model=MODEL)
        waits = await mill.submit(asked(), when_unserved="wait")
        async with working(empty_redis, cache := echo_adapters(1 << 20, 16)):
            assert (await waits.result(timeout=60)).adapter == old.ref
            with pytest.raises(InvalidRequest, match=r"is in use"):
                await mill.add_adapter("tone", second, model=MODEL)
            new = await mill.add_adapter("tone", second, model=MODEL, replace=True)
            assert new.digest != old.digest

            async def is_new() -> bool:
                result = await (await mill.submit(asked())).result(timeout=60)
                return result.adapter == new.ref

            await wait_until(is_new)
            assert set(cache.names()) == {f"tone@{old.digest}", f"tone@{new.digest}"}


def room_for_one(tmp_path: Path) -> AdapterCache:
    """Memory of a worker that holds one plain adapter, and not two."""
    path = save_plain_adapter(tmp_path / "measured")
    size = (path / "adapter_model.safetensors").stat().st_size
    return echo_adapters(size + size // 2, 16)


async def add_all(mill: Client, tmp_path: Path, *names: str) -> None:
    for name in names:
        path = save_plain_adapter(tmp_path / name)
        await mill.add_adapter(name, path, model=MODEL)


async def test_jobs_wait_for_room_and_can_be_cancelled_meanwhile(
    empty_redis, newest_redis, tmp_path
) -> None:
    long = Sampling(max_tokens=4000, ignore_eos=True)
    cache = room_for_one(tmp_path)
    async with (
        scheduling(empty_redis, CONFIG),
        working(empty_redis, cache, step_ms=4),
        Client(newest_redis.url) as mill,
    ):
        await add_all(mill, tmp_path, "a", "b")
        runs = await mill.submit(Prompt("x", model=MODEL, adapter="a", sampling=long))
        await wait_until(lambda: cache.stats().leased == 1)
        waits = await mill.submit(asked(adapter="b"))
        late = await mill.submit(asked(adapter="b", deadline_s=1.0))
        gone = await mill.submit(asked(adapter="b"))
        await wait_until(lambda: _is_running(mill, gone.id))
        await gone.cancel()
        with pytest.raises(JobCancelled):
            await gone.result(timeout=60)
        with pytest.raises(JobFailed, match=r"deadline"):
            await late.result(timeout=60)
        assert cache.names()[0].startswith("a@")
        await runs.cancel()
        assert (await waits.result(timeout=60)).text == "b: hello"
        assert (cache.stats().evictions, cache.stats().loaded) == (1, 1)


async def test_who_waits_long_for_room_goes_before_those_that_came_later(
    empty_redis, newest_redis, tmp_path, monkeypatch
) -> None:
    """Jobs of one adapter follow each other without a gap; another's gets in."""
    monkeypatch.setattr(adapters_start, "PATIENCE_S", 0.2)
    steady = Sampling(max_tokens=150, ignore_eos=True)
    cache = room_for_one(tmp_path)
    async with (
        scheduling(empty_redis, CONFIG),
        working(empty_redis, cache, step_ms=2),
        Client(newest_redis.url) as mill,
    ):
        await add_all(mill, tmp_path, "busy", "rare")

        async def keep_busy() -> None:
            prompt = Prompt("x", model=MODEL, adapter="busy", sampling=steady)
            async for _ in ticks(0.1):  # each begins while the one before runs
                await mill.submit(prompt)

        busy = asyncio.create_task(keep_busy())
        await wait_until(lambda: cache.stats().leased == 1)
        assert await answer(mill, asked(adapter="rare")) == "rare: hello"
        assert not busy.done()
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)


async def test_what_is_larger_than_the_memory_is_refused_at_once(
    empty_redis, newest_redis, tmp_path
) -> None:
    path = save_plain_adapter(tmp_path / "large")
    size = (path / "adapter_model.safetensors").stat().st_size
    async with (
        scheduling(empty_redis, CONFIG),
        working(empty_redis, echo_adapters(size - 1, 16)),
        Client(newest_redis.url) as mill,
    ):
        with pytest.raises(InvalidRequest, match=r"'large' is .*adapters_memory_mb"):
            await mill.add_adapter("large", path, model=MODEL)


async def test_files_that_never_come_are_said_and_block_no_other_check(
    empty_redis, tmp_path
) -> None:
    good = save_plain_adapter(tmp_path / "good")
    facts = echo_adapters(1 << 20, 16).check(good)

    class Away:
        def check(self, path: Path) -> AdapterFacts:
            if path != good:
                threading.Event().wait(30)
            return facts

    checks = AdapterChecks(
        client=empty_redis,
        loader=Away(),  # type: ignore[arg-type]
        base="w",
        limit_s=1.0,
        outage=Outage(),
    )
    verdicts = {}
    for name, path in (("1", tmp_path / "away"), ("2", good)):
        request = encode(AdapterCheck(path=str(path)))
        await empty_redis.set(check_key(name), request, px=10_000)
        checks.ask(name)
    for name in ("1", "2"):
        raw = await wait_until(partial(empty_redis.get, verdict_key(name)))
        verdicts[name] = msgspec.json.decode(raw, type=AdapterVerdict)
    assert "did not come within 1 s" in (verdicts["1"].problem or "")
    assert verdicts["2"].problem is None
    await checks.close()


async def test_a_removal_whose_reply_was_lost_is_no_error(
    mill, tmp_path, monkeypatch
) -> None:
    path = save_plain_adapter(tmp_path / "tone")
    await mill.add_adapter("tone", path, model=MODEL)
    remove, lost = AdapterRegistry.remove, iter([True])

    async def removed(self, name: str):
        card = await remove(self, name)
        if next(lost, False):
            raise RedisUnavailable("the reply is lost")
        return card

    monkeypatch.setattr(AdapterRegistry, "remove", removed)
    assert (await mill.remove_adapter("tone", model=MODEL)).name == "tone"
    with pytest.raises(UnknownAdapter):
        await mill.remove_adapter("tone", model=MODEL)


async def _is_running(mill: Client, job_id: str) -> bool:
    return (await mill.job(job_id).info()).state == "running"


async def test_a_worker_keeps_to_the_tenant_whatever_a_client_has_written(
    mill, tmp_path, empty_redis
) -> None:
    path = save_plain_adapter(tmp_path / "own")
    await mill.add_adapter("own", path, model=MODEL, tenant="acme")
    assert await answer(mill, asked(adapter="own", tenant="acme")) == "own: hello"
    with pytest.raises(UnknownAdapter, match=r"it has none"):
        await mill.submit(asked(adapter="own", tenant="globex"))
    (card,) = await AdapterRegistry(empty_redis, MODEL).cards()
    mill.session.adapter = _names(card.ref)  # type: ignore[method-assign]
    job = await mill.submit(asked(adapter="own", tenant="globex"))
    with pytest.raises(JobFailed, match=r"that the tenant 'globex' may use") as caught:
        await job.result(timeout=60)
    assert caught.value.error_code == "unknown_adapter"


def _names(ref: object):
    async def adapter(_prompt: Prompt) -> object:
        return ref

    return adapter


async def test_a_worker_of_the_version_that_serves_is_asked(
    empty_redis, newest_redis
) -> None:
    """Another version may have other layers."""
    pool = Pool(empty_redis)
    for version in ("v1", "v2"):
        await pool.group(f"w-{version}", version=version)
    async with Client(newest_redis.url) as mill:
        found = await asking.channels(mill.session, "tiny")
        assert set(found) == {KEYS.control("w-v1"), KEYS.control("w-v2")}
        await Versions(empty_redis, "tiny").fix({"v1": 30.0, "v2": 70.0})
        assert await asking.channels(mill.session, "tiny") == [KEYS.control("w-v2")]


async def test_a_switch_that_would_lose_adapters_is_refused_by_name(
    empty_redis, newest_redis, tmp_path, monkeypatch
) -> None:
    paths = [save_plain_adapter(tmp_path / f"r{n}", rank=n) for n in (2, 4)]
    lost = save_plain_adapter(tmp_path / "lost", rank=4)
    async with (
        working(empty_redis, echo_adapters(1 << 20, 16)),
        Client(newest_redis.url) as mill,
    ):
        versions = Versions(empty_redis, MODEL)
        for name in ("v1", "v2", "v3"):
            model = ModelConfig(name=MODEL, version=name)
            await versions.add(VersionSpec(version=name, model=model, state="ready"))
        await versions.fix({"v1": 100.0})
        for path in (*paths, lost):
            await mill.add_adapter(path.name, path, model=MODEL)
        shutil.rmtree(lost)  # nobody serves it, so no switch takes it away
        small = echo_adapters(1 << 20, 2)
        async with working(empty_redis, small, version="v2", weights="other"):
            with pytest.raises(VersionConflict, match=r"serve 1 .*: r4 \(.*rank 4"):
                await mill.switch_version(MODEL, "v2", 25)
            forced = await mill.switch_version(MODEL, "v2", 25, force=True)
            assert forced == {"v1": 75, "v2": 25}
            assert await mill.switch_version(MODEL, "v2", 0) == {"v1": 100}
            await mill.remove_adapter("r4", model=MODEL)
            assert await mill.switch_version(MODEL, "v2") == {"v2": 100}
        # The same weights need no question, and silence is no refusal.
        assert await mill.switch_version(MODEL, "v1") == {"v1": 100}
        told: list[str] = []
        monkeypatch.setattr(fitting, "ALL_S", 0.0)
        async with working(empty_redis, small, version="v3", weights="third"):
            await mill.switch_version(MODEL, "v3", tell=told.append)
        assert told == ["not checked on v3, nobody answered: lost, r2"]


async def test_a_worker_that_serves_none_says_so(
    empty_redis, newest_redis, tmp_path
) -> None:
    path = save_plain_adapter(tmp_path / "tone")
    async with scheduling(empty_redis, CONFIG), Client(newest_redis.url) as mill:
        with pytest.raises(ModelUnavailable, match=r"it is a worker that checks"):
            await mill.add_adapter("tone", path, model=MODEL)
        async with working(empty_redis, None):
            with pytest.raises(InvalidRequest, match=r"this worker serves none"):
                await mill.add_adapter("tone", path, model=MODEL)
