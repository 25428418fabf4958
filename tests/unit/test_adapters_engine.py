"""The engine and adapters: who holds one, and who shares a cached prefix with whom."""

from __future__ import annotations

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
