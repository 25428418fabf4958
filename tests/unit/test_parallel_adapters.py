"""Loads of adapters over ranks: all of them have it, or none keeps anything."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.ranks import ThreadFollowers
from support.waiting import wait_until_sync

from tokenmill.shared.errors import AdapterUnavailable, ModelLoadError
from tokenmill.workers.engine.adapters.cache import AdapterCache
from tokenmill.workers.engine.adapters.checkpoint import AdapterFacts
from tokenmill.workers.engine.adapters.source import LoadedAdapter
from tokenmill.workers.engine.parallel import adapters as parallel_adapters
from tokenmill.workers.engine.parallel.adapter_orders import DropOrder, LoadOrder
from tokenmill.workers.engine.parallel.adapters import FollowerAdapters, GroupLoader

PATH = Path("/adapters/one")


class Part:
    """A rank's loader; its adapter has the digest "d" unless told otherwise."""

    def __init__(self, size: int = 10, digest: str = "d") -> None:
        self.size = size
        self.digest = digest
        self.error: Exception | None = None
        self.gate: threading.Event | None = None
        """Loads wait for it, when it is set."""

    def load(self, path: Path) -> LoadedAdapter:
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        facts = AdapterFacts(
            rank=1, alpha=1.0, targets=(), bytes=0, digest=self.digest, base=str(path)
        )
        return LoadedAdapter(facts, {}, self.size)


class Group:
    """Three ranks without a model."""

    def __init__(self, patience_s: float = 60.0) -> None:
        self.parts = [Part(), Part(), Part(25)]
        self.link = ThreadFollowers()
        self.link.adapters = self.others = [
            FollowerAdapters(self.parts[rank], self.link.answering(rank))
            for rank in (1, 2)
        ]
        self.loader = GroupLoader(self.parts[0], self.link, patience_s)
        self.cache = AdapterCache(self.loader, 60)

    @property
    def tickets(self) -> list[frozenset[str]]:
        return [one.tickets() for one in self.others]


def test_a_load_counts_what_the_fullest_rank_has() -> None:
    group = Group()
    loaded = group.loader.load(PATH)
    assert (loaded.nbytes, loaded.ticket) == (25, "1")
    assert group.tickets == [{"1"}, {"1"}]
    assert group.others[0].get("1").facts.base == str(PATH)
    loaded.drop()
    assert group.tickets == [set(), set()]
    with pytest.raises(AdapterUnavailable, match="load 1"):
        group.others[0].get("1")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ((1, {"error": ModelLoadError("no file")}), "rank 1 cannot load it: no file"),
        ((2, {"error": MemoryError("full")}), "rank 2 .* load it: MemoryError: full"),
        ((2, {"digest": "other"}), "changed while the ranks read it: rank 2"),
        ((0, {"error": ModelLoadError("bad")}), "^bad$"),
    ],
)
def test_what_one_rank_cannot_load_none_keeps(
    fault: tuple[int, dict[str, object]], told: str
) -> None:
    group = Group()
    group.cache.load("good", PATH, "d").release()
    rank, change = fault
    vars(group.parts[rank]).update(change)
    with pytest.raises(ModelLoadError, match=told):
        group.cache.load("bad", PATH, "d")
    wait_until_sync(lambda: group.tickets == [{"1"}, {"1"}], what="its end everywhere")
    assert group.cache.names() == ("good",)


def test_a_rank_that_does_not_answer_fails_that_load_alone() -> None:
    group = Group(patience_s=0.05)
    gate = group.parts[2].gate = threading.Event()
    with pytest.raises(ModelLoadError, match=r"not read by every rank within 0\.05 s"):
        group.cache.load("slow", PATH, "d")
    group.parts[2].gate, group.loader._patience_s = None, 60.0
    group.loader.load(PATH).drop()
    gate.set()  # what comes late is kept nowhere
    wait_until_sync(lambda: not reads(group.others[1]), what="the end of the read")
    assert group.tickets == [set(), set()]


def reads(adapters: FollowerAdapters) -> int:
    return adapters._num_reads


def test_reads_that_never_end_are_not_added_to_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel_adapters, "_MOST_READS", 2)
    answers = []
    part = Part()
    part.gate = threading.Event()
    adapters = FollowerAdapters(part, answers.append)
    for ticket in "123":
        adapters.hear(LoadOrder(ticket, str(PATH)))
        adapters.hear(DropOrder(ticket))
    (answer,) = answers
    assert answer.ticket == "3"
    assert "2 reads before it do not end" in str(answer.problem)
    part.gate.set()
    wait_until_sync(lambda: not reads(adapters), what="the end of both")
    assert (answers, adapters.tickets()) == ([answer], frozenset())


def test_what_rank_0_does_not_take_in_is_dropped_everywhere() -> None:
    """Of another digest than registered, or for want of room; and what gives way."""
    group = Group()
    with pytest.raises(ModelLoadError, match="has changed since it was registered"):
        group.cache.load("a", PATH, "e")
    assert group.tickets == [set(), set()]
    held = [group.cache.load(key, PATH, "d") for key in "ab"]
    assert group.tickets == [{"2", "3"}, {"2", "3"}]
    with pytest.raises(AdapterUnavailable, match="in use by running requests"):
        group.cache.load("c", PATH, "d")
    assert group.tickets == [{"2", "3"}, {"2", "3"}]
    held[0].release()
    group.cache.load("c", PATH, "d").release()
    assert group.cache.names() == ("b", "c")
    assert group.tickets == [{"3", "5"}, {"3", "5"}]
    group.cache.check(PATH)
    assert group.tickets == [{"3", "5"}, {"3", "5"}]
