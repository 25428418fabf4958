"""The cache of adapters: what is leased stays, the rest goes by recency."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from support.waiting import wait_until_sync

from tokenmill.shared.errors import AdapterUnavailable, ModelLoadError
from tokenmill.workers.engine.adapters.cache import AdapterCache
from tokenmill.workers.engine.adapters.checkpoint import AdapterFacts
from tokenmill.workers.engine.adapters.source import LoadedAdapter


class Shelf:
    """A loader whose adapters are as large as their file names say."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.gate: threading.Event | None = None
        """Loads wait for it, when it is set."""
        self.gates: list[threading.Event] = []
        """The same for the first loads, one each."""
        self.broken: Exception | None = None
        self.faults: list[Exception] = []
        """Of the first loads."""
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def load(self, path: Path) -> LoadedAdapter:
        facts = AdapterFacts(
            rank=1, alpha=1.0, targets=(), bytes=0, digest=path.name, base=""
        )
        with self._lock:
            number = len(self.loads)
            self.loads.append(path.name)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        gate = self.gates[number] if number < len(self.gates) else self.gate
        if gate is not None:
            assert gate.wait(60)
        with self._lock:
            self.at_once -= 1
        if self.broken is not None:
            raise self.broken
        if number < len(self.faults):
            raise self.faults[number]
        return LoadedAdapter(facts, {}, int(path.name))


def load(cache: AdapterCache, key: str, size: int):
    return cache.load(key, Path(str(size)), str(size))


def test_the_least_recently_leased_goes_first() -> None:
    cache = AdapterCache(Shelf(), 100)
    for key in "abc":
        load(cache, key, 30).release()
    cache.lease("a").release()
    load(cache, "d", 30).release()
    assert cache.names() == ("c", "a", "d")
    load(cache, "e", 60).release()
    assert cache.names() == ("d", "e")
    stats = cache.stats()
    assert (stats.loaded, stats.leased, stats.bytes, stats.budget) == (2, 0, 90, 100)
    assert (stats.loads, stats.evictions) == (5, 3)


def test_what_is_leased_is_never_evicted() -> None:
    cache = AdapterCache(Shelf(), 100)
    first = load(cache, "a", 60)
    second = cache.lease("a")
    load(cache, "b", 40).release()
    with pytest.raises(AdapterUnavailable, match="in use by running requests"):
        load(cache, "c", 50)
    assert cache.names() == ("a", "b")  # nothing was given up for what did not fit
    first.release()
    first.release()  # harmless
    assert cache.stats().leased == 1
    with pytest.raises(AdapterUnavailable):
        load(cache, "c", 50)
    second.release()
    load(cache, "c", 50).release()
    assert cache.names() == ("b", "c")


def test_what_can_never_fit_says_so() -> None:
    cache = AdapterCache(Shelf(), 100)
    load(cache, "a", 60).release()
    for attempt in (lambda: load(cache, "b", 101), lambda: cache.check(Path("101"))):
        with pytest.raises(ModelLoadError, match=r"adapters_memory_mb"):
            attempt()
    assert cache.names() == ("a",)
    assert cache.check(Path("100")).digest == "100"


def test_only_what_is_loaded_can_be_leased() -> None:
    cache = AdapterCache(Shelf(), 100)
    for ask in (cache.lease, cache.get):
        with pytest.raises(AdapterUnavailable, match="a is not loaded"):
            ask("a")
    with load(cache, "a", 10) as lease:
        assert cache.get("a") is lease.adapter
        assert cache.stats().leased == 1
    assert cache.stats().leased == 0


def test_other_content_than_registered_is_refused() -> None:
    cache = AdapterCache(Shelf(), 100)
    with pytest.raises(ModelLoadError, match="has changed since it was registered"):
        cache.load("a", Path("10"), "other")
    assert cache.names() == ()


def test_one_load_serves_all_who_ask_at_once() -> None:
    shelf = Shelf()
    shelf.gate = threading.Event()
    cache = AdapterCache(shelf, 100)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(load, cache, "a", 10) for _ in range(4)]
        assert cache.names() == ()  # not before it is whole
        shelf.gate.set()
        leases = [one.result(60) for one in asked]
    assert shelf.loads == ["10"]
    assert len({id(lease.adapter) for lease in leases}) == 1
    for lease in leases:
        lease.release()
    assert cache.stats().leased == 0


def test_a_failed_load_leaves_nothing_and_can_be_tried_again() -> None:
    shelf = Shelf()
    shelf.broken = ModelLoadError("damaged")
    cache = AdapterCache(shelf, 100)
    with pytest.raises(ModelLoadError, match="damaged"):
        load(cache, "a", 10)
    shelf.broken = None
    load(cache, "a", 10).release()
    assert shelf.loads == ["10", "10"]
    assert cache.names() == ("a",)


def test_what_finds_no_room_is_read_once_however_often_it_is_asked_for() -> None:
    shelf = Shelf()
    cache = AdapterCache(shelf, 100)
    running = load(cache, "a", 60)
    for _ in range(3):
        with pytest.raises(AdapterUnavailable, match="in use by running requests"):
            load(cache, "b", 50)
    assert shelf.loads == ["60", "50"]
    running.release()
    load(cache, "b", 50).release()
    assert shelf.loads == ["60", "50", "50"]


def test_a_caller_who_comes_after_a_failed_load_enters_nothing_twice() -> None:
    """The first fails; the second has its turn; the third must not load beside it."""
    shelf = Shelf()
    shelf.gates = [threading.Event() for _ in range(3)]
    shelf.faults = [ModelLoadError("damaged")]
    cache = AdapterCache(shelf, 100)
    with ThreadPoolExecutor(3) as threads:
        first, second = (threads.submit(load, cache, "a", 10) for _ in range(2))
        shelf.gates[0].set()
        wait((first, second), return_when=FIRST_COMPLETED)
        wait_until_sync(lambda: len(shelf.loads) == 2)  # the second reads now
        third = threads.submit(load, cache, "a", 10)
        shelf.gates[2].set()
        wait_until_sync(lambda: third.done() or third.running())
        shelf.gates[1].set()
        asked = (first, second, third)
        leases = [one.result(60) for one in asked if not one.exception(60)]
    assert len(leases) == len(shelf.loads) == 2
    assert len({id(lease.adapter) for lease in leases}) == 1
    assert (cache.stats().loaded, cache.stats().bytes) == (1, 10)
    for lease in leases:
        lease.release()
    load(cache, "b", 100).release()  # nothing is left over of what was counted
    assert (cache.names(), cache.stats().bytes) == (("b",), 100)


def test_few_are_read_at_once() -> None:
    shelf = Shelf()
    shelf.gate = threading.Event()
    cache = AdapterCache(shelf, 100)
    with ThreadPoolExecutor(9) as threads:
        asked = [threads.submit(load, cache, str(size), size) for size in range(1, 10)]
        wait_until_sync(lambda: len(shelf.loads) == 4)
        shelf.gate.set()
        for one in asked:
            one.result(60).release()
    assert shelf.most_at_once == 4
    assert len(cache.names()) == 9
