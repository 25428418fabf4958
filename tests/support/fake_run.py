"""A bulk run without Redis: what its driver calls, and a source and sink in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from tokenmill.producer.bulk.flow import Done, Entry, Fed, Settled
from tokenmill.producer.bulk.sink import state_of
from tokenmill.shared.bulk.messages import (
    FeedStatus,
    Item,
    Outcome,
    RunSpec,
    RunState,
    RunView,
)
from tokenmill.shared.messages import Prompt, Usage

from .waiting import loop_turns

SPEC = RunSpec(kind="run")


class FakeRun:
    """The store of a run and its orchestrator in one.

    Args:
        settle: Item -> its outcome, or None to leave it waiting.
    """

    def __init__(self, settle: Callable[[Item], Outcome | None]) -> None:
        self.settle = settle
        self.items: dict[int, Item] = {}
        self.out: list[tuple[str, Outcome]] = []
        self.state: RunState = "open"
        self.total: int | None = None
        self.refused = 0
        self.has_left = False
        self.losses = 0
        self.away_s: float | None = None
        self.most_in_redis = 0
        self.num_fed = 0
        self.num_acknowledged = 0
        self._entry = 0

    async def create(self) -> bool:
        return True

    async def feed(self, items: Sequence[Item]) -> list[FeedStatus]:
        statuses = [self._feed(item) for item in items]
        self.most_in_redis = max(self.most_in_redis, len(self.items))
        self.work()
        return statuses

    def _feed(self, item: Item) -> FeedStatus:
        if self.state != "open":
            return "closed"
        if item.seq in self.items:
            return "known"
        self.items[item.seq] = item
        self.num_fed += 1
        return "new"

    def work(self) -> None:
        """Settles what can be settled."""
        settled = {outcome.seq for _, outcome in self.out}
        for seq, item in self.items.items():
            outcome = None if seq in settled else self.settle(item)
            if outcome is not None:
                self._entry += 1
                self.out.append((f"{self._entry:06d}", outcome))

    async def wait(
        self, after: str, timeout_s: float, count: int
    ) -> list[tuple[str, Outcome]]:
        found = [row for row in self.out if row[0] > after][:count]
        if not found:
            await loop_turns(5)
        return found

    async def ack(self, seqs: Sequence[int]) -> None:
        settled = {outcome.seq for _, outcome in self.out}
        for seq in settled.intersection(seqs):
            self.items.pop(seq)
            self.num_acknowledged += 1
        self.out = [row for row in self.out if row[1].seq not in seqs]

    async def set_total(self) -> None:
        self.total = self.num_fed

    async def set_refused(self, count: int) -> None:
        self.refused = count

    async def leave(self) -> None:
        self.has_left = True

    async def beat(self) -> RunState:
        return self.state

    async def reopen(self) -> RunState:
        self.state = "open"
        return self.state

    async def view(self) -> RunView:
        return RunView(
            run="r",
            spec=SPEC,
            state=self.state,
            fed=self.num_fed,
            acknowledged=self.num_acknowledged,
        )

    async def is_orchestrated(self) -> bool:
        return True


class MemorySink:
    """Lines in a list. What it wrote outlives a driver, as a file does."""

    def __init__(self) -> None:
        self.lines: list[Settled] = []
        self.dropped: list[Outcome] = []

    def written(self, seqs: Sequence[int]) -> AbstractSet[int]:
        return {one.seq for one in self.lines}.intersection(seqs)

    def write(self, settled: Sequence[Settled]) -> None:
        known = self.written([one.seq for one in settled])
        self.lines += [one for one in settled if one.seq not in known]

    def drop(self, outcomes: Sequence[Outcome]) -> None:
        self.dropped += outcomes

    def counts(self) -> Mapping[str, int]:
        states = [state_of(one) for one in self.lines]
        return {state: states.count(state) for state in states}


class ListSource:
    """Entries of a list that have no line yet.

    Args:
        entries: All of them.
        sink: Knows which have.
    """

    def __init__(self, entries: Sequence[Entry], sink: MemorySink) -> None:
        self._entries = entries
        self._sink = sink
        self.total: int | None = len(entries)

    def entries(self) -> Iterator[Entry]:
        for entry in self._entries:
            if not self._sink.written([entry.seq]):
                yield entry


def fed(seq: int, *, size: int = 10, generation: int = 0) -> Fed:
    """An item of a run."""
    item = Item(
        seq=seq, generation=generation, custom_id=f"c{seq}", prompt=Prompt(f"p{seq}")
    )
    return Fed(item=item, size=size)


def succeed(item: Item) -> Outcome:
    """The outcome of an item that succeeds."""
    return Outcome(
        seq=item.seq,
        generation=item.generation,
        custom_id=item.custom_id,
        state="succeeded",
        usage=Usage(prompt_tokens=2, completion_tokens=1),
    )


def done(seq: int) -> Done:
    """An item that succeeded."""
    one = fed(seq)
    return Done(fed=one, outcome=succeed(one.item))
