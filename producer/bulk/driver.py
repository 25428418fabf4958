"""The driver of a run: feeds items, collects outcomes, and loses neither.

What an item goes through: it is fed to Redis; the orchestrator makes jobs of it and
settles it; the sink writes its line and syncs; only then is the outcome acknowledged
and taken out of Redis. Each step may be repeated, so driver, orchestrator and Redis may
die between any two of them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from ...shared.bulk.messages import RunSpec, RunState, RunView
from ...shared.bulk.store import KEEP_MS
from ...shared.tasks import end_tasks
from .collecting import Collector
from .feeding import Feeder
from .flow import WRONG, Fed, Progress, Report, Sink, Source
from .rates import Rates
from .store_calls import StoreCalls
from .window import Window

if TYPE_CHECKING:
    from ..client import Client

BEAT_S: Final = 2.0
"""Time between two signs of life; each brings what Redis says of the run."""
PROGRESS_S: Final = 0.5
"""Time between two reports of progress."""
LEAVE_S: Final = 60.0
"""How long a cancelled run may take to settle what was in the pool."""
_log: Final = logging.getLogger("tokenmill.producer")
"""The standard library's: a caller's process decides what becomes of its messages."""


class BulkDriver:
    """Drives one run from its source to its sink.

    Args:
        client: An open client; its patience is how long an outage of Redis may last.
        source: Where items come from.
        sink: Where lines go.
        spec: What the run is to do.
        run_id: The run's id, the same whenever it is driven again.
        reopen: A run that was cancelled goes on; else it stays so.
        on_progress: Called about twice a second, on the event loop.
        window: Bounds of what is in the pool at once.
        keep_ms: How long the run's keys stay after they were last touched.
    """

    def __init__(
        self,
        client: "Client",
        source: Source,
        sink: Sink,
        spec: RunSpec,
        *,
        run_id: str,
        reopen: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        window: Window | None = None,
        keep_ms: int = KEEP_MS,
    ) -> None:
        self._source = source
        self._sink = sink
        self._run_id = run_id
        self._reopen = reopen
        self._on_progress = on_progress
        self._calls = StoreCalls(client.session, run_id, spec, keep_ms=keep_ms)
        self._window = Window() if window is None else window
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-bulk")
        self._feeder = Feeder(self._calls, source, sink, self._window, self._in_thread)
        self._collector = Collector(self._calls, sink, self._window, self._in_thread)
        self._rates = Rates()
        self._view: RunView | None = None
        self._note: str | None = None
        self._forgotten = 0
        self._refused = 0

    async def run(self) -> Report:
        """Works the source off.

        Returns:
            How it ended: every item has its line, or the run was cancelled.

        Raises:
            RedisUnavailable: Redis did not answer for longer than the patience. What
                is written stays, and driving the run again goes on from there.
            BulkOutputFailed: The sink could not write a line; likewise.
            TokenmillError: The source broke off; what it gave before is written.
        """
        try:
            counts = await self._in_thread(self._sink.counts)
            view = await self._begin()
            tokens = view.prompt_tokens + view.completion_tokens
            self._rates.begin(sum(counts.values()), tokens)
            await self._work()
            if self._feeder.broken is not None:
                raise self._feeder.broken
            return await self._report()
        finally:
            # A write in progress ends before the caller may close the sink.
            self._thread.shutdown(wait=True)
            await self._calls.leave()

    async def _begin(self) -> RunView:
        await self._calls.create()
        view = self._view = await self._calls.view()
        state = view.state
        if state == "cancelling":
            state = await self._when_cancelled()
        if state == "cancelled" and self._reopen:
            await self._collector.drop_cancelled()
            await self._calls.reopen()
        elif state in ("cancelling", "cancelled"):
            self._feeder.close()
            await self._salvage()
        return view

    async def _when_cancelled(self) -> RunState:
        """Waits until the orchestrator has cancelled all that was open."""
        leave_at = time.monotonic() + LEAVE_S
        while (state := await self._calls.beat()) == "cancelling":
            if time.monotonic() > leave_at:
                break
            await asyncio.sleep(PROGRESS_S)
        return state

    async def _salvage(self) -> None:
        """Writes what had succeeded in a cancelled run whose driver was gone."""
        await self._collector.drop_cancelled()
        left = await self._collector.unsettled()
        entries = self._source.entries()
        while left and (batch := await self._in_thread(self._feeder.take, entries)):
            items = [entry for entry in batch if isinstance(entry, Fed)]
            await self._collector.settle_late(items, left)

    async def _work(self) -> None:
        """Feeds and collects side by side; what one raises ends all."""
        others = [
            asyncio.create_task(self._feeder.run(), name="feed"),
            asyncio.create_task(self._watch(), name="watch"),
            asyncio.create_task(self._tell(), name="progress"),
        ]
        collecting = asyncio.create_task(self._collect(), name="collect")
        tasks = [*others, collecting]
        try:
            pending = set(tasks)
            while not collecting.done():
                done, pending = await asyncio.wait(
                    pending, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
        finally:
            await end_tasks(*tasks)

    async def _collect(self) -> None:
        """Collects until nothing is left to come."""
        leave_at: float | None = None
        while not (self._feeder.is_done and not len(self._window)):
            await self._collector.turn()
            if self._feeder.is_closed:
                now = time.monotonic()
                leave_at = now + LEAVE_S if leave_at is None else leave_at
                if now > leave_at:
                    _log.warning(
                        "%d items of the cancelled run %s have not settled; leaving",
                        len(self._window),
                        self._run_id,
                    )
                    return

    async def _watch(self) -> None:
        """Says that we live, learns of a cancel, and finds what Redis has forgotten."""
        losses, odd = self._calls.losses, False
        while True:
            await asyncio.sleep(BEAT_S)
            if await self._calls.beat() in ("cancelling", "cancelled"):
                self._feeder.close()
            await self._say_refused()
            before = self._in_hand()
            self._view = await self._calls.view()
            self._note = await self._missing()
            was_odd, odd = odd, self._is_odd(before)
            if self._calls.losses > losses or (was_odd and odd):
                losses, odd = self._calls.losses, False
                await self._resync()

    async def _say_refused(self) -> None:
        refused = (await self._in_thread(self._sink.counts)).get("refused", 0)
        if refused != self._refused:
            await self._calls.set_refused(refused)
            self._refused = refused

    def _in_hand(self) -> tuple[int, int]:
        return self._feeder.num_items, len(self._window)

    def _is_odd(self, before: tuple[int, int]) -> bool:
        """Whether Redis holds other items than we fed, while nothing moves."""
        assert self._view is not None
        moved = self._in_hand() != before
        reading = not self._feeder.is_done and self._view.in_redis > len(self._window)
        return not (moved or reading) and self._view.in_redis != len(self._window)

    async def _resync(self) -> None:
        """After a crash of Redis its last second may be gone: say it all again."""
        self._collector.start_over()
        self._forgotten += await self._feeder.feed_again()
        if self._feeder.is_done and not self._feeder.is_closed:
            await self._feeder.say_total()

    async def _missing(self) -> str | None:
        if await self._calls.is_orchestrated():
            return None
        return (
            "no janitor advances bulk runs in this pool: `tokenmill up` starts one, "
            "`tokenmill janitor` is one alone"
        )

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            if self._on_progress is not None:
                self._on_progress(await self._progress())

    async def _progress(self) -> Progress:
        counts = await self._in_thread(self._sink.counts)
        succeeded = counts.get("succeeded", 0)
        settled = sum(counts.values())
        away_s, view = self._calls.away_s, self._view
        note = self._note
        if away_s is not None:
            note = f"Redis has not answered for {away_s:.0f} s; trying on"
        tokens = 0 if view is None else view.prompt_tokens + view.completion_tokens
        return Progress(
            run=self._run_id,
            elapsed_s=self._rates.elapsed_s,
            total=self._source.total,
            succeeded=succeeded,
            failed=settled - succeeded,
            in_flight=len(self._window),
            eta_s=self._rates.eta_s(settled, self._source.total),
            tokens_per_s=self._rates.tokens_per_s(tokens),
            view=view,
            note=note,
        )

    async def _report(self) -> Report:
        counts = await self._in_thread(self._sink.counts)
        await self._say_refused()
        view = self._view = await self._calls.view()
        if view.state in ("cancelling", "cancelled") and view.cancelled:
            # The last items may be here before `_watch` has learned of the cancel.
            self._feeder.close()
        if self._on_progress is not None:
            self._on_progress(await self._progress())
        return Report(
            run=self._run_id,
            state="cancelled" if self._feeder.is_closed else "complete",
            total=None if self._feeder.is_closed else sum(counts.values()),
            succeeded=counts.get("succeeded", 0),
            failed=counts.get("failed", 0) + counts.get("cancelled", 0),
            refused=sum(counts.get(state, 0) for state in WRONG),
            seconds=self._rates.elapsed_s,
            windows=view.windows,
            jobs=view.jobs,
            prompt_tokens=view.prompt_tokens,
            completion_tokens=view.completion_tokens,
            fell_back=view.fell_back,
            forgotten=self._forgotten,
        )

    async def _in_thread(self, work: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, *args)
