"""Many jobs at once: each is yielded as it ends, results read in batches."""

from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Final, cast

from .inbox import SILENCE_S, EndInbox
from .job import Job
from .session import Session
from .standing import look_at, settled_by

_BATCH: Final = 500
"""Results per MGET: large enough to make the round trip cheap, small enough that a
reply of long results stays in the tens of megabytes."""


class Completions:
    """The jobs of one `as_completed` that have not been yielded yet.

    Args:
        session: The client's connections.
        jobs: Handles; a job given twice is yielded once.
    """

    def __init__(self, session: Session, jobs: Iterable[Job]) -> None:
        self._session = session
        self._pending: dict[bytes, Job] = {}
        for job in jobs:
            channel = job.shard.wake(job.id).encode()
            self._pending.setdefault(channel, job)
        self._channels = list(self._pending)
        self._inbox = EndInbox()
        self._ended: deque[Job] = deque()

    async def iterate(self) -> AsyncGenerator[Job, None]:
        """Yields each job once it has ended; its `result()` answers at once."""
        try:
            await self._session.subscribe(self._channels, self._inbox)
            channels: list[bytes] | None = None
            while self._pending:
                await self._look(channels)
                while self._ended:
                    yield self._ended.popleft()
                if self._pending:
                    channels = await self._inbox.take(SILENCE_S)
        finally:
            self._session.listener.unsubscribe(self._channels, self._inbox)

    async def _look(self, channels: list[bytes] | None) -> None:
        """Settles the jobs of these channels, or of all when None."""
        known_to_end = channels is not None
        wanted = self._pending if channels is None else channels
        waiting = [c for c in wanted if c in self._pending]
        for start in range(0, len(waiting), _BATCH):
            await self._settle(waiting[start : start + _BATCH], known_to_end)

    async def _settle(self, channels: list[bytes], known_to_end: bool) -> None:
        shards: dict[str, list[tuple[bytes, Job]]] = {}
        for channel in channels:
            job = self._pending[channel]
            shards.setdefault(job.shard.prefix, []).append((channel, job))
        for several in shards.values():
            raws = await self._results([job for _, job in several])
            missing = []
            for (channel, job), raw in zip(several, raws, strict=True):
                if raw is None:
                    missing.append((channel, job))
                    continue
                job.settle(settled_by(raw))
                self._end(channel, job)
            if missing and not known_to_end:
                await self._drop_unending(missing)

    async def _results(self, jobs: list[Job]) -> list[bytes | None]:
        names = [job.shard.output(job.id) for job in jobs]
        (found,) = await self._session.read(("MGET", *names))
        return cast("list[bytes | None]", found)

    async def _drop_unending(self, several: list[tuple[bytes, Job]]) -> None:
        """A job without a record, or with an odd one, never ends: its `result()`
        says so, and the others go on.
        """
        found = await look_at(self._session, [job.job_id for _, job in several])
        for (channel, job), standing in zip(several, found, strict=True):
            if standing is not None:
                job.settle(standing)
                self._end(channel, job)

    def _end(self, channel: bytes, job: Job) -> None:
        del self._pending[channel]
        self._ended.append(job)
