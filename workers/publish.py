"""Deltas from the engine to Redis: coalesced, in order, retried under the same id.

Per choice the first and the last delta leave at once; those between are held for
`emit_ms` and joined. One loop sends, so a job's deltas never overtake each other and
its end never overtakes them. While Redis is away everything waits in order here.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import structlog

from ..shared.clock import RedisClock
from ..shared.messages import encode
from ..shared.outage import Outage
from ..shared.script_types import EmitItem
from ..shared.scripts import Scripts
from .buffering import Buffer, Sealed
from .ending import RECORDED, Ending
from .engine.request import TokenDelta
from .finish import FINISH_BATCH, Recorder
from .jobs import JobTable, RunningJob
from .outage import repeated
from .token_rate import TokenRate

EMIT_BATCH: Final = 256
"""Deltas in one call: long enough to be cheap, short enough not to block Redis."""
MAX_BUFFERED_TOKENS: Final = 65_536
"""The engine pauses above this: some minutes of output of a CPU worker."""
T = TypeVar("T", Sealed, Ending)


class Publisher:
    """Sends deltas and ends of jobs.

    Args:
        scripts: Redis.
        group: This incarnation of the worker.
        table: The jobs in hand; a job that is not in it any more is not sent.
        recorder: Writes the ends.
        clock: Redis time, for the time of the first token.
        outage: Shared state of the connection.
        emit_s: How long deltas are held for joining.
        on_lost: Called with a job that another epoch owns by now.
        on_cancelled: Called with a job that somebody has cancelled.
        on_sent: Called when Redis has taken a batch of deltas.
        rate: Counts tokens, for people.
    """

    def __init__(
        self,
        *,
        scripts: Scripts,
        group: str,
        table: JobTable,
        recorder: Recorder,
        clock: RedisClock,
        outage: Outage,
        emit_s: float,
        on_lost: Callable[[RunningJob], None],
        on_cancelled: Callable[[RunningJob], None],
        on_sent: Callable[[], None],
        rate: TokenRate | None = None,
    ) -> None:
        self._scripts = scripts
        self._group = group
        self._table = table
        self._recorder = recorder
        self._clock = clock
        self._outage = outage
        self._emit_s = emit_s
        self._on_lost = on_lost
        self._on_cancelled = on_cancelled
        self._on_sent = on_sent
        self._log = structlog.get_logger()
        self._buffers: dict[tuple[str, int], Buffer] = {}
        self._unsent: deque[Sealed] = deque()
        self._endings: deque[Ending] = deque()
        self._event = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None
        self.buffered_tokens = 0
        """Tokens that Redis has not acknowledged yet."""
        self.rate = rate or TokenRate()

    # --- called by the bridge ------------------------------------------------------
    def add(self, job: RunningJob, delta: TokenDelta) -> None:
        """Takes a delta of a job in hand."""
        self.rate.add(job, job.take(delta), delta)
        self.buffered_tokens += len(delta.token_ids)
        self._idle.clear()
        key = (job.engine_id, delta.choice)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = Buffer(job, delta, time.monotonic() + self._emit_s)
            self._buffers[key] = buffer
        buffer.add(delta)
        first = delta.choice not in job.opened
        if first or delta.finish_reason is not None or not self._emit_s:
            job.opened.add(delta.choice)
            self._seal(key)
            self._event.set()
        elif self._timer is None:
            self._arm(self._emit_s)

    def end(self, ending: Ending) -> None:
        """Takes the end of a job; what is held of it leaves before."""
        job = ending.job
        job.closing = True
        for choice in tuple(job.progress):
            if (job.engine_id, choice) in self._buffers:
                self._seal((job.engine_id, choice))
        self._endings.append(ending)
        self._idle.clear()
        self._event.set()

    def forget(self, job: RunningJob) -> None:
        """Drops what is held of a job that is not ours any more."""
        for choice in tuple(job.progress):
            buffer = self._buffers.pop((job.engine_id, choice), None)
            if buffer is not None:
                self.buffered_tokens -= len(buffer.tokens)

    async def settled(self) -> None:
        """Waits until Redis has everything."""
        await self._idle.wait()

    # --- the loop ------------------------------------------------------------------
    async def run(self) -> None:
        """Sends until it is cancelled."""
        while True:
            await self._event.wait()
            self._event.clear()
            self._seal_due()
            while self._unsent:
                await self._send_on()
            if self._endings:
                await self._finish()
            if not (self._buffers or self._unsent or self._endings):
                self._idle.set()

    def _arm(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, delay_s), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._event.set()

    def _seal_due(self) -> None:
        now = time.monotonic()
        due = [key for key, buffer in self._buffers.items() if buffer.due <= now]
        for key in due:
            self._seal(key)
        if self._buffers and self._timer is None:
            # Buffers are in order of age and all held equally long.
            oldest = next(iter(self._buffers.values()))
            self._arm(oldest.due - now)

    def _seal(self, key: tuple[str, int]) -> None:
        buffer = self._buffers.pop(key)
        job = buffer.job
        item = EmitItem(
            job_id=job.id,
            epoch=job.epoch,
            seq=job.next_seq(),
            delta=encode(buffer.seal()),
        )
        job.unsent += 1
        self._unsent.append(Sealed(job, item, len(buffer.tokens)))

    async def _send_on(self) -> None:
        """Sends the next deltas; in the same round trip the ends that follow them."""
        batch = self._next_batch()
        ends = self._ends_after(batch)
        if ends:

            async def send() -> None:
                await self._send_with_ends(batch, ends)

            if await repeated(send, "finish", self._outage):
                gone = {id(ending) for ending in ends}
                self._endings = deque(e for e in self._endings if id(e) not in gone)
                return
        if batch:
            await self._persist("emit", batch, self._send)

    def _next_batch(self) -> list[Sealed]:
        batch: list[Sealed] = []
        while self._unsent and len(batch) < EMIT_BATCH:
            sealed = self._unsent.popleft()
            self.buffered_tokens -= sealed.num_tokens
            if self._table.holds(sealed.job):
                batch.append(sealed)
        return batch

    def _ends_after(self, batch: Sequence[Sealed]) -> list[Ending]:
        """Returns ends that wait for nothing but the deltas of this batch."""
        if len(batch) > FINISH_BATCH or not self._endings:
            return []
        unsent = Counter(sealed.job.engine_id for sealed in batch)
        ready = [
            ending
            for ending in self._endings
            if ending.way in RECORDED
            and self._table.holds(ending.job)
            and 0 < ending.job.unsent == unsent[ending.job.engine_id]
        ]
        return ready[:FINISH_BATCH]

    async def _send_with_ends(
        self, batch: Sequence[Sealed], ends: Sequence[Ending]
    ) -> None:
        for ending in ends:
            if ending.job.first_ms is None:  # the results that are now built tell it
                ending.job.first_ms = self._clock.now_ms()
        items = [sealed.item for sealed in batch]
        statuses = await self._recorder.write_after(items, ends)
        for sealed, status in zip(batch, statuses, strict=True):
            # Of a job that has left, its end has told already how.
            if self._table.holds(sealed.job):
                self._emitted(sealed.job, status)
        self._on_sent()

    async def _send(self, batch: Sequence[Sealed]) -> None:
        items = [sealed.item for sealed in batch]
        statuses = await self._scripts.emit(group=self._group, items=items)
        for sealed, status in zip(batch, statuses, strict=True):
            self._emitted(sealed.job, status)
        self._on_sent()

    def _emitted(self, job: RunningJob, status: str) -> None:
        job.unsent -= 1
        if status == "lost":
            self._on_lost(job)
            return
        if job.first_ms is None:
            job.first_ms = self._clock.now_ms()
        if status == "cancelled" and not job.closing:
            self._on_cancelled(job)

    async def _finish(self) -> None:
        """Writes the ends of jobs whose deltas have all arrived."""
        ready: list[Ending] = []
        for _ in range(len(self._endings)):
            ending = self._endings.popleft()
            if not self._table.holds(ending.job):
                continue
            if ending.job.unsent:
                self._endings.append(ending)
                self._event.set()
            else:
                ready.append(ending)
        for batch in self._recorder.batches(ready):
            await self._persist("finish", batch, self._recorder.write)

    async def _persist(
        self,
        where: str,
        batch: Sequence[T],
        send: Callable[[Sequence[T]], Awaitable[None]],
    ) -> None:
        """Repeats a call, unchanged, until Redis has answered it.

        What Redis refuses for good is sent one by one, so that only the item at
        fault is lost; its job's lease runs out and the job is redelivered.
        """

        async def call() -> None:
            await send(batch)

        if await repeated(call, where, self._outage):
            return
        if len(batch) > 1:
            for item in batch:
                await self._persist(where, [item], send)
            return
        job = batch[0].job
        self._log.error("redis_refused", during=where, job=job.id, epoch=job.epoch)
        self._on_lost(job)
