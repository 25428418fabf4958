"""The engine and adapters: who holds one, and who shares a cached prefix with whom."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from support.engine_driver import drain, request
from support.fake_runner import FakeRunner

from tokenmill.shared.errors import AdapterUnavailable, InvalidRequest
from tokenmill.workers.engine.adapters.cache import AdapterCache
from tokenmill.workers.engine.adapters.checkpoint import AdapterFacts
from tokenmill.workers.engine.adapters.source import LoadedAdapter
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.request import EngineRequest


class Anything:
    """A loader to which every path is an adapter."""

    def load(self, path: Path) -> LoadedAdapter:
        facts = AdapterFacts(
            rank=1, alpha=1.0, targets=(), bytes=0, digest=path.name, base=""
        )
        return LoadedAdapter(facts, {}, 1)


def loaded(*keys: str) -> AdapterCache:
    cache = AdapterCache(Anything(), 100)
    for key in keys:
        cache.load(key, Path("d"), "d").release()
    return cache


def engine(cache: AdapterCache | None, **options: object) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner()
    options = {"step_target_ms": 0.0, **options}
    return Engine(runner, TokenTable.for_bytes(), adapters=cache, **options), runner


def with_adapter(key: str | None, name: str, prompt, **sampling) -> EngineRequest:
    plain = request(name, prompt, ignore_eos=True, **sampling)
    return msgspec.structs.replace(plain, adapter=key)


def test_a_lease_lasts_from_add_to_the_last_choice() -> None:
    cache = loaded("a@1", "b@2")
    made, _ = engine(cache)
    made.add(with_adapter("a@1", "one", range(5), n=3, max_tokens=4))
    made.add(with_adapter("a@1", "two", range(9), max_tokens=9))
    made.add(with_adapter(None, "three", range(9), max_tokens=12))
    assert cache.stats().leased == 1
    drain(made)
    assert cache.stats().leased == 0


@pytest.mark.parametrize("end", ["cancel", "expire", "abort_all"])
def test_whoever_is_sent_away_gives_it_back(end: str) -> None:
    cache = loaded("a@1")
    made, _ = engine(cache)
    made.add(with_adapter("a@1", "one", range(5), max_tokens=40))
    made.step()
    getattr(made, end)(*(() if end == "abort_all" else ("one",)))
    assert cache.stats().leased == 0
    assert not made.has_work


def test_a_request_that_fails_gives_it_back() -> None:
    cache = loaded("a@1")
    made, runner = engine(cache)
    runner.poison[4] = float("nan")
    made.add(with_adapter("a@1", "one", range(5), max_tokens=40))
    (failed,) = made.step().finished
    assert failed.error is not None
    assert cache.stats().leased == 0


def test_what_is_not_loaded_fails_that_request_alone() -> None:
    made, _ = engine(loaded("a@1"))
    made.add(with_adapter("a@1", "one", range(5)))
    with pytest.raises(AdapterUnavailable, match="b@2 is not loaded"):
        made.add(with_adapter("b@2", "two", range(5)))
    assert drain(made).finished.keys() == {"one"}
    made.add(with_adapter("a@1", "two", range(5)))  # its id was not taken


def test_an_engine_without_adapters_refuses_them_by_field() -> None:
    made, _ = engine(None)
    with pytest.raises(InvalidRequest, match="serves the base model alone") as caught:
        made.add(with_adapter("a@1", "one", range(5)))
    assert caught.value.field == "adapter"
    assert not made.has_work


def test_a_step_says_which_slice_has_which_adapter() -> None:
    made, runner = engine(loaded("a@1", "b@2"))
    made.add(with_adapter("b@2", "one", range(3), max_tokens=3))
    made.add(with_adapter(None, "two", range(3), max_tokens=6))
    made.add(with_adapter("a@1", "three", range(3), max_tokens=3))
    drain(made)
    assert runner.batches[0].adapters == ("b@2", None, "a@1")
    assert runner.batches[-1].adapters == ()  # only the plain one goes on


def hits(first: str | None, second: str | None) -> int:
    made, _ = engine(loaded("a@1", "a@2"))
    prompt = list(range(13))
    for name, key in (("one", first), ("two", second)):
        made.add(with_adapter(key, name, prompt, max_tokens=2))
        drain(made)
    return made.capacity().prefix_tokens_hit


def test_a_cached_prefix_serves_its_own_adapter_alone() -> None:
    assert hits("a@1", "a@1") == hits(None, None) == 12
    assert hits("a@1", None) == hits(None, "a@1") == hits("a@1", "a@2") == 0


class Watchful(FakeRunner):
    """Looks up the adapters of each step, as a model does in the midst of one."""

    cache: AdapterCache

    def run(self, batch):
        for key in batch.adapters:
            if key is not None:
                self.cache.get(key)
        return super().run(batch)


def test_no_step_misses_an_adapter_while_others_push_for_its_room() -> None:
    """Room for two of four, loaded in other threads, requests sent away at random."""
    cache = AdapterCache(Anything(), 2)
    runner = Watchful()
    runner.cache = cache
    made = Engine(runner, TokenTable.for_bytes(), adapters=cache, step_target_ms=0.0)
    coming: queue.Queue[str] = queue.Queue(1)
    done = threading.Event()

    def bring(seed: int) -> None:
        chosen = random.Random(seed)
        while not done.is_set():
            key = f"{chosen.choice('abcd')}@1"
            unlucky = contextlib.suppress(AdapterUnavailable, queue.Full)
            with unlucky, cache.load(key, Path("d"), "d"):
                coming.put(key, timeout=0.01)
                coming.join()  # until the engine has a hold of its own

    def serve() -> None:
        chosen = random.Random(0)
        for number in range(200):
            name, key = str(number), coming.get(timeout=60)
            made.add(with_adapter(key, name, range(5), max_tokens=6))
            coming.task_done()
            for _ in range(chosen.randrange(8)):
                assert all(one.error is None for one in made.step().finished)
            if chosen.random() < 0.3:
                made.cancel(name)

    with ThreadPoolExecutor(3) as threads:
        bringing = [threads.submit(bring, seed) for seed in range(3)]
        try:
            serve()
        finally:
            done.set()
            while not all(one.done() for one in bringing):
                with contextlib.suppress(queue.Empty):
                    coming.get(timeout=0.01)
                    coming.task_done()
    assert [one.result() for one in bringing] == [None] * 3
    drain(made)
    stats = cache.stats()
    assert (stats.leased, stats.bytes) == (0, stats.loaded)
    assert stats.evictions == stats.loads - stats.loaded > 0
