"""Tokenized jobs in memory that wait to be dispatched.

A copy, never the truth: every job here still has its entry in Redis, so a takeover
loses nothing by starting empty.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec

from ..shared.messages import JobClass
from .snapshot import WaitingJob

MOST_JOBS: Final = 20_000
"""Beyond this many, bulk lanes are not read on; interactive ones still are."""
MOST_TOKENS: Final = 16_000_000
"""The same bound in prompt tokens: four bytes each are kept in memory."""
CANDIDATES: Final = 1_024
"""Jobs that a plan looks at, so that its time has a bound."""


class Ready(msgspec.Struct, frozen=True):
    """A job that can be dispatched."""

    job: WaitingJob
    token_ids: bytes
    """Little-endian int32."""
    stream: str
    entry_id: str


class WaitingRoom:
    """Ready jobs by stream, in the order of their streams."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[str, Ready]] = {}
        self._stream_of: dict[str, str] = {}
        self._tokens = 0
        self._deadlines: list[tuple[int, str]] = []
        """A heap; entries of jobs that left stay until they are due."""

    def __len__(self) -> int:
        return len(self._stream_of)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._stream_of

    def __iter__(self) -> Iterator[Ready]:
        for stream in self._streams.values():
            yield from stream.values()

    def count(self, stream: str) -> int:
        """Returns how many jobs of a stream wait here."""
        return len(self._streams.get(stream, ()))

    def accepts(self, job_class: JobClass | None) -> bool:
        """Whether more jobs of this class are to be read."""
        room = 1 if job_class is JobClass.BULK else 2
        return len(self) < room * MOST_JOBS and self._tokens < room * MOST_TOKENS

    def add(self, ready: Ready) -> None:
        """Takes a job in; one with the same id is replaced."""
        self.take(ready.job.id)
        self._streams.setdefault(ready.stream, {})[ready.job.id] = ready
        self._stream_of[ready.job.id] = ready.stream
        self._tokens += ready.job.tokens
        if ready.job.deadline_ms is not None:
            heapq.heappush(self._deadlines, (ready.job.deadline_ms, ready.job.id))

    def take(self, job_id: str) -> Ready | None:
        """Removes and returns a job, or None when it is not here."""
        stream = self._stream_of.pop(job_id, None)
        if stream is None:
            return None
        jobs = self._streams[stream]
        ready = jobs.pop(job_id)
        if not jobs:
            del self._streams[stream]
        self._tokens -= ready.job.tokens
        return ready

    def candidates(self) -> tuple[WaitingJob, ...]:
        """Returns the jobs that a plan should look at: the front of every stream.

        Where streams are many, each has one at least, so that none hides another.
        """
        if len(self) <= CANDIDATES:
            return tuple(ready.job for ready in self)
        share = max(1, CANDIDATES // len(self._streams))
        return tuple(
            ready.job
            for stream in self._streams.values()
            for ready in islice(stream.values(), share)
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
        stream = self._stream_of.get(job_id)
        return None if stream is None else self._streams[stream][job_id]

    def take_all(self, job_ids: Iterable[str]) -> None:
        """Removes jobs that are here."""
        for job_id in job_ids:
            self.take(job_id)
