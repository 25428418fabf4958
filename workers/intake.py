"""From the group's work stream to jobs in hand.

The stream is read from a cursor kept here; the start script removes each entry. Only
this incarnation reads it, so nothing is ever claimed or pending.
"""

from collections.abc import Callable, Sequence
from typing import Final, cast

import redis.asyncio
import structlog

from ..shared.errors import NewerSchema, TokenmillError
from ..shared.messages import JobError, JobRequest
from ..shared.outage import REDIS_ERRORS, Backoff, Outage
from ..shared.script_types import Started, StartItem
from ..shared.scripts import Scripts
from .ending import Ending, Way
from .engine.request import EngineRequest
from .engine_thread import job_error
from .jobs import JobTable, RunningJob
from .resume import completed, engine_request, read_request

READ_COUNT: Final = 128
"""Entries in one read and one start."""
BLOCK_MS: Final = 2000
"""Longest wait of one read; below any sensible socket time-out."""

_Entry = tuple[bytes, dict[bytes, bytes]]


class Intake:
    """Reads dispatched jobs and starts them.

    Args:
        client: Redis, for the blocking read.
        scripts: Redis, for the start.
        stream: Name of the work stream.
        group: This incarnation of the worker.
        lease_ms: Length of the leases taken.
        weights_version: An output begun with other weights cannot be continued.
        table: Where started jobs are entered.
        outage: Shared state of the connection.
        take: Called with jobs that the engine is to run.
        end: Called with jobs that end at once: cancelled, invalid, or complete.
        lost: Called with an earlier epoch of a job that has now come again.
        bring: Called with a job that needs an adapter before the engine can have it.
    """

    def __init__(
        self,
        *,
        client: "redis.asyncio.Redis",
        scripts: Scripts,
        stream: str,
        group: str,
        lease_ms: int,
        weights_version: str,
        table: JobTable,
        outage: Outage,
        take: Callable[[Sequence[tuple[RunningJob, EngineRequest]]], None],
        end: Callable[[Ending], None],
        lost: Callable[[RunningJob], None],
        bring: Callable[[RunningJob, EngineRequest], None],
    ) -> None:
        self._client = client
        self._scripts = scripts
        self._stream = stream
        self._group = group
        self._lease_ms = lease_ms
        self._weights_version = weights_version
        self._table = table
        self._outage = outage
        self._take = take
        self._end = end
        self._lost = lost
        self._bring = bring
        self._cursor = b"0"
        self._starting: list[StartItem] = []
        """Being started; repeated unchanged if the reply does not arrive."""
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Reads and starts until it is cancelled."""
        backoff = Backoff()
        while True:
            try:
                if not self._starting:
                    await self._fetch(await self._read(BLOCK_MS))
                if self._starting:
                    await self._start()
            except REDIS_ERRORS as error:
                self._outage.failed("intake", error)
                await backoff.wait()
            else:
                self._outage.recovered()
                backoff.reset()

    async def hand_back(self) -> int:
        """Releases what was dispatched here and not started; for draining.

        Returns:
            How many jobs went back to the queue.
        """
        released = len(self._starting)
        if self._starting:
            jobs = [(item.job_id, item.epoch) for item in self._starting]
            await self._scripts.release(group=self._group, jobs=jobs)
            self._starting = []
        while entries := await self._read(None):
            jobs = [(item.job_id, item.epoch) for item in self._items(entries)]
            if jobs:
                await self._scripts.release(group=self._group, jobs=jobs)
            await self._client.xdel(
                self._stream, *[entry_id for entry_id, _ in entries]
            )
            self._cursor = entries[-1][0]
            released += len(jobs)
        return released

    async def _read(self, block_ms: int | None) -> list[_Entry]:
        reply = await self._client.xread(
            {self._stream: self._cursor}, count=READ_COUNT, block=block_ms
        )
        if not reply:
            return []
        return cast("list[_Entry]", reply[0][1])

    def _items(self, entries: Sequence[_Entry]) -> list[StartItem]:
        items: list[StartItem] = []
        for entry_id, fields in entries:
            try:
                item = StartItem(
                    job_id=fields[b"id"].decode(),
                    epoch=int(fields[b"epoch"]),
                    entry_id=entry_id.decode(),
                )
            except (KeyError, ValueError) as error:
                self._log.error(
                    "bad_work_entry", entry=entry_id.decode(), error=str(error)
                )
            else:
                items.append(item)
        return items

    async def _fetch(self, entries: Sequence[_Entry]) -> None:
        if not entries:
            return
        items = self._items(entries)
        if len(items) < len(entries):
            good = {item.entry_id.encode() for item in items}
            await self._client.xdel(
                self._stream, *[key for key, _ in entries if key not in good]
            )
        self._cursor = entries[-1][0]
        self._starting = items

    async def _start(self) -> None:
        started = await self._scripts.start(
            group=self._group, lease_ms=self._lease_ms, items=self._starting
        )
        self._starting = []
        ready = [pair for one in started if (pair := self._accept(one)) is not None]
        for job, request in ready:
            if request.adapter is not None:
                self._bring(job, request)
        ready = [pair for pair in ready if pair[1].adapter is None]
        if ready:
            self._take(ready)

    def _accept(self, started: Started) -> tuple[RunningJob, EngineRequest] | None:
        if started.status == "lost":
            self._log.info("job_lost", job=started.job_id, at="start")
            return None
        if started.status == "cancelled":
            job = self._enter(started, JobRequest(), _empty(started))
            self._end(Ending(job, Way.CANCELLED))
            return None
        request: JobRequest | None = None
        try:
            request = read_request(started)
            engine_input = engine_request(started, request)
        except NewerSchema as error:
            # Its scheduler did not know yet what is read here; it does by now.
            self._log.warning("schema_too_new", job=started.job_id, error=str(error))
            job = self._enter(started, JobRequest(), _empty(started))
            self._end(Ending(job, Way.RELEASE))
            return None
        except (TokenmillError, ValueError) as error:
            job = self._enter(started, request or JobRequest(), _empty(started))
            self._end(Ending(job, Way.FAILED, error=job_error(error)))
            return None
        job = self._enter(started, request, engine_input)
        if started.weights not in {None, self._weights_version}:
            self._end(Ending(job, Way.FAULT, error=self._other_weights(started)))
            return None
        done = completed(engine_input)
        if done is not None and len(done) == request.sampling.n:
            self._end(Ending(job, Way.SUCCEEDED, choices=done))
            return None
        return job, engine_input

    def _other_weights(self, started: Started) -> JobError:
        return JobError(
            code="weights_changed",
            message=f"the output was begun with weights {started.weights}, this worker "
            f"has {self._weights_version}; submit the job again",
        )

    def _enter(
        self, started: Started, request: JobRequest, engine_input: EngineRequest
    ) -> RunningJob:
        job = RunningJob(started, request, engine_input)
        earlier = self._table.add(job)
        if earlier is not None:
            self._lost(earlier)
        return job


def _empty(started: Started) -> EngineRequest:
    """Stands in for a request that cannot be read."""
    return EngineRequest(
        id=f"{started.job_id}@{started.epoch}",
        token_ids=(),
        sampling=JobRequest().sampling,
        seed=0,
    )
