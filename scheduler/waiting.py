"""Tokenized jobs in memory that wait to be dispatched.

A copy, never the truth: every job here still has its entry in Redis, so a takeover
loses nothing by starting empty.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, Literal

import msgspec

from ..shared.keys import lane_of
from ..shared.messages import JobClass
from .snapshot import WaitingJob
from .targets import Targets

MOST_JOBS: Final = 20_000
"""Of the interactive lanes and of the bulk lanes, each on its own: neither keeps the
other from being read."""
MOST_TOKENS: Final = 16_000_000
"""The same bound in prompt tokens: four bytes each are kept in memory."""
MOST_RESUMED_JOBS: Final = 100_000
"""Of `resume`, as many as may wait by default: all tenants share it, so that what is
not read there is hidden."""
MOST_RESUMED_TOKENS: Final = 50_000_000
SCARCE: Final = 32
"""Where shares are spread over versions, a lane is read on while it has fewer jobs here
for one of them, so that a version that is slow does not hide the jobs of another."""
READ_FURTHER: Final = 8
"""So many times as much of a lane is read for that at most."""
CANDIDATES: Final = 1_024
"""Jobs that a plan looks at, so that its time has a bound."""


class Ready(msgspec.Struct, frozen=True):
    """A job that can be dispatched."""

    job: WaitingJob
    token_ids: bytes
    """Little-endian int32."""
    stream: str
    entry_id: str
    resumed: bool = False
    """It came through `resume`, which all tenants and classes share."""


_Lane = tuple[str, JobClass, int, bool, str]
_Source = JobClass | Literal["apart"] | None
"""Whose lanes; None: `resume`; apart: jobs that no live group is for."""
_APART: Final = "apart"


def _lane(ready: Ready) -> _Lane:
    """Where a job waits here: as `resume` has one stream, by class and tenant too."""
    job = ready.job
    if not ready.resumed:
        return ready.stream, job.job_class, 0, False, job.needs
    return ready.stream, job.job_class, lane_of(job.tenant), job.started, job.needs


class WaitingRoom:
    """Ready jobs by lane, in the order of their streams."""

    def __init__(self) -> None:
        self._lanes: dict[_Lane, dict[str, Ready]] = {}
        self._lane_of: dict[str, _Lane] = {}
        self._by_stream: Counter[str] = Counter()
        self._jobs: Counter[_Source] = Counter()
        self._tokens: Counter[_Source] = Counter()
        self.unfetched: Counter[str] = Counter()
        """Jobs of each stream whose input is being fetched; they count as well."""
        self._deadlines: list[tuple[int, str]] = []
        """A heap; entries of jobs that left stay until they are due."""
        self.targets = Targets()
        """Where jobs may go; `aim_at` sets it."""
        self.begun_with: Counter[str] = Counter()
        """Weights that outputs of the jobs here were begun with -> how many."""

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._lane_of

    def __iter__(self) -> Iterator[Ready]:
        for lane in self._lanes.values():
            yield from lane.values()

    def count(self, stream: str) -> int:
        """Returns how many jobs of a stream are in memory.

        Those that no live group is for do not count: they must not hide what stands
        behind them.
        """
        return self._by_stream[stream] + self.unfetched[stream]

    def lacks(self, stream: str, job_class: JobClass, read_ahead: int) -> bool:
        """Whether there is too little of a lane for one of several versions.

        Args:
            stream: The lane.
            job_class: Its class.
            read_ahead: Most jobs of it where there is one version.
        """
        spread = self.targets.spread
        if len(spread) < 2 or self.count(stream) > READ_FURTHER * read_ahead:
            return False
        lanes = ((stream, job_class, 0, False, need) for need in spread)
        scarce = min(SCARCE, read_ahead // 2)
        return any(len(self._lanes.get(lane, ())) < scarce for lane in lanes)

    def aim_at(self, targets: Targets) -> None:
        """Gives every job here the needs that it has from now on.

        Args:
            targets: As the route and the live groups are now.
        """
        before, self.targets = self.targets, targets
        bound = self.begun_with or any(needs for *_, needs in self._lanes)
        if not (bound or before.routed or targets.routed):
            return  # nobody here needs anything of anybody
        waiting = sorted(self, key=lambda ready: ready.job.enqueued_ms)
        self._lanes.clear()
        self._lane_of.clear()
        for counter in (self._by_stream, self._jobs, self._tokens, self.begun_with):
            counter.clear()
        self._deadlines.clear()
        for ready in waiting:
            self.add(ready)

    def accepts(self, source: JobClass | None) -> bool:
        """Whether more jobs of this class, or of `resume` (None), are to be read."""
        # Nobody knows before an entry is read whether a group is for it.
        if self._jobs[_APART] >= MOST_RESUMED_JOBS:
            return False
        if self._tokens[_APART] >= MOST_RESUMED_TOKENS:
            return False
        jobs, tokens = self._jobs[source], self._tokens[source]
        if source is None:
            return jobs < MOST_RESUMED_JOBS and tokens < MOST_RESUMED_TOKENS
        return jobs < MOST_JOBS and tokens < MOST_TOKENS

    def add(self, ready: Ready) -> None:
        """Takes a job in; one with the same id is replaced."""
        self.take(ready.job.id)
        ready = self._aimed(ready)
        lane = _lane(ready)
        self._lanes.setdefault(lane, {})[ready.job.id] = ready
        self._lane_of[ready.job.id] = lane
        self._count(ready, 1)
        if ready.job.deadline_ms is not None:
            heapq.heappush(self._deadlines, (ready.job.deadline_ms, ready.job.id))

    def _aimed(self, ready: Ready) -> Ready:
        job, targets = ready.job, self.targets
        if not (job.version or job.weights or job.needs or targets.routed):
            return ready
        needs = targets.needs(job.id, job.version, job.weights)
        if needs == job.needs:
            return ready
        job = msgspec.structs.replace(job, needs=needs)
        return msgspec.structs.replace(ready, job=job)

    def _is_apart(self, needs: str) -> bool:
        return bool(needs) and needs not in self.targets.offered

    def _source(self, ready: Ready) -> _Source:
        if self._is_apart(ready.job.needs):
            return _APART
        return None if ready.resumed else ready.job.job_class

    def _count(self, ready: Ready, sign: int) -> None:
        source = self._source(ready)
        self._jobs[source] += sign
        self._tokens[source] += sign * ready.job.tokens
        if ready.job.weights:
            _bump(self.begun_with, ready.job.weights, sign)
        if source != _APART:
            _bump(self._by_stream, ready.stream, sign)

    def take(self, job_id: str) -> Ready | None:
        """Removes and returns a job, or None when it is not here."""
        lane = self._lane_of.pop(job_id, None)
        if lane is None:
            return None
        jobs = self._lanes[lane]
        ready = jobs.pop(job_id)
        if not jobs:
            del self._lanes[lane]
        self._count(ready, -1)
        return ready

    def candidates(self) -> tuple[WaitingJob, ...]:
        """Returns the jobs that a plan should look at: the front of every lane.

        Where lanes are many, each has one at least, so that none hides another.
        """
        apart = self._jobs[_APART]
        lanes = [
            lane
            for name, lane in self._lanes.items()
            if not (apart and self._is_apart(name[-1]))
        ]
        if len(self) - apart <= CANDIDATES:
            return tuple(ready.job for lane in lanes for ready in lane.values())
        share = max(1, CANDIDATES // len(lanes))
        return tuple(
            ready.job for lane in lanes for ready in islice(lane.values(), share)
        )

    def expired(self, now_ms: int) -> list[str]:
        """Returns the jobs whose deadline has passed; each is told of once."""
        found: list[str] = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, job_id = heapq.heappop(self._deadlines)
            ready = self._find(job_id)
            due = None if ready is None else ready.job.deadline_ms
            if due is not None and due <= now_ms:
                found.append(job_id)
        return found

    def _find(self, job_id: str) -> Ready | None:
        lane = self._lane_of.get(job_id)
        return None if lane is None else self._lanes[lane][job_id]

    def take_all(self, job_ids: Iterable[str]) -> None:
        """Removes jobs that are here."""
        for job_id in job_ids:
            self.take(job_id)


def _bump(counter: "Counter[str]", name: str, by: int) -> None:
    counter[name] += by
    if not counter[name]:
        del counter[name]
