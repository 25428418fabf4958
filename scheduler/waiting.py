"""Tokenized jobs in memory that wait to be dispatched.

A copy, never the truth: every job here still has its entry in Redis, so a takeover
loses nothing by starting empty.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec

from ..shared.keys import lane_of
from ..shared.messages import JobClass
from .snapshot import WaitingJob

MOST_JOBS: Final = 20_000
"""Of the interactive lanes and of the bulk lanes, each on its own: neither keeps the
other from being read."""
MOST_TOKENS: Final = 16_000_000
"""The same bound in prompt tokens: four bytes each are kept in memory."""
MOST_RESUMED_JOBS: Final = 100_000
"""Of `resume`, as many as may wait by default: all tenants share it, so that what is
not read there is hidden."""
MOST_RESUMED_TOKENS: Final = 50_000_000
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


_Lane = tuple[str, JobClass, int, bool]
_Source = JobClass | None
"""Whose lanes; None: `resume`."""


def _lane(ready: Ready) -> _Lane:
    """Where a job waits here: as `resume` has one stream, by class and tenant too."""
    job = ready.job
    if not ready.resumed:
        return ready.stream, job.job_class, 0, False
    return ready.stream, job.job_class, lane_of(job.tenant), job.started


def _source(ready: Ready) -> _Source:
    return None if ready.resumed else ready.job.job_class


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

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._lane_of

    def __iter__(self) -> Iterator[Ready]:
        for lane in self._lanes.values():
            yield from lane.values()

    def count(self, stream: str) -> int:
        """Returns how many jobs of a stream are in memory."""
        return self._by_stream[stream] + self.unfetched[stream]

    def accepts(self, source: JobClass | None) -> bool:
        """Whether more jobs of this class, or of `resume` (None), are to be read."""
        jobs, tokens = self._jobs[source], self._tokens[source]
        if source is None:
            return jobs < MOST_RESUMED_JOBS and tokens < MOST_RESUMED_TOKENS
        return jobs < MOST_JOBS and tokens < MOST_TOKENS

    def add(self, ready: Ready) -> None:
        """Takes a job in; one with the same id is replaced."""
        self.take(ready.job.id)
        lane = _lane(ready)
        self._lanes.setdefault(lane, {})[ready.job.id] = ready
        self._lane_of[ready.job.id] = lane
        self._count(ready, 1)
        if ready.job.deadline_ms is not None:
            heapq.heappush(self._deadlines, (ready.job.deadline_ms, ready.job.id))

    def _count(self, ready: Ready, sign: int) -> None:
        source = _source(ready)
        self._by_stream[ready.stream] += sign
        if not self._by_stream[ready.stream]:
            del self._by_stream[ready.stream]
        self._jobs[source] += sign
        self._tokens[source] += sign * ready.job.tokens

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
        if len(self) <= CANDIDATES:
            return tuple(ready.job for ready in self)
        share = max(1, CANDIDATES // len(self._lanes))
        return tuple(
            ready.job
            for lane in self._lanes.values()
            for ready in islice(lane.values(), share)
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
