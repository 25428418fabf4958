"""From Redis into the sink: written and synced first, acknowledged after that."""

from collections.abc import Sequence
from typing import Final

from ...shared.bulk.messages import Outcome
from .feeding import InThread
from .flow import Done, Fed, Sink
from .store_calls import StoreCalls
from .window import Window

BATCH: Final = 256
"""Outcomes read and written at a time: one sync for all of them."""
WAIT_S: Final = 1.0
EARLY_S: Final = 0.1
"""Wait while outcomes are here whose items the source has not come to again."""
START: Final = "0"
"""Before the first entry of the stream."""


class Collector:
    """Collects the outcomes of a run.

    Args:
        calls: The run's store.
        sink: Where their lines go.
        window: What is in the pool.
        in_thread: Runs a function on the thread of source and sink.
    """

    def __init__(
        self, calls: StoreCalls, sink: Sink, window: Window, in_thread: InThread
    ) -> None:
        self._calls = calls
        self._sink = sink
        self._window = window
        self._in_thread = in_thread
        self._after = START
        self._early: dict[int, Outcome] = {}

    async def turn(self) -> None:
        """Waits for outcomes, and settles those that are there."""
        wait_s = EARLY_S if self._early else WAIT_S
        found = await self._calls.wait(self._after, wait_s, BATCH)
        if found:
            self._after = found[-1][0]
        known = self._early | {outcome.seq: outcome for _, outcome in found}
        if known:
            await self._settle(known)

    def start_over(self) -> None:
        """Reads from the first outcome again: an acknowledgement may be lost."""
        self._after = START

    async def drop_cancelled(self) -> None:
        """Takes what the cancelling of a run settled out of Redis, without lines."""
        after = START
        while found := await self._calls.wait(after, 0.001, BATCH):
            after = found[-1][0]
            await self._drop([o for _, o in found if o.state == "cancelled"])

    async def unsettled(self) -> dict[int, Outcome]:
        """Returns what Redis still holds for us, by item, without waiting for more."""
        left: dict[int, Outcome] = {}
        after = START
        while found := await self._calls.wait(after, 0.001, BATCH):
            after = found[-1][0]
            left |= {outcome.seq: outcome for _, outcome in found}
        return left

    async def settle_late(self, items: Sequence[Fed], left: dict[int, Outcome]) -> None:
        """Writes what is left for some items that are not in the window.

        Args:
            items: As the source has them.
            left: Outcomes by item; those that are written are taken out.
        """
        own = [(fed, left.pop(fed.seq)) for fed in items if fed.seq in left]
        await self._write([Done(fed=fed, outcome=outcome) for fed, outcome in own])

    async def _settle(self, known: dict[int, Outcome]) -> None:
        """Writes what belongs to items in the window, and acknowledges it."""
        self._early = {}
        done: list[Done] = []
        strangers: list[int] = []
        outdated: list[Fed] = []
        for seq, outcome in known.items():
            fed = self._window.get(seq)
            if fed is None:
                strangers.append(seq)
            elif outcome.generation >= fed.item.generation:
                done.append(Done(fed=fed, outcome=outcome))
            else:
                outdated.append(fed)
        if any(one.outcome.state == "cancelled" for one in done):
            done = await self._without_cancelled(done)
        await self._write(done)
        await self._pass_over(strangers, known)
        if outdated:
            # An earlier try had not settled when this one was fed, and now it has.
            await self._calls.feed([fed.item for fed in outdated])

    async def _write(self, done: Sequence[Done]) -> None:
        if not done:
            return
        await self._in_thread(self._sink.write, done)
        seqs = [one.seq for one in done]
        async with self._window.leaving:
            self._window.remove(seqs)
            await self._calls.ack(seqs)

    async def _pass_over(self, seqs: list[int], known: dict[int, Outcome]) -> None:
        """Outcomes of items that are not in the window: written before, or early."""
        if not seqs:
            return
        seqs.sort()
        written = await self._in_thread(self._sink.written, seqs)
        # The source of a second run has to come to an item before it can be written.
        self._early = {seq: known[seq] for seq in seqs if seq not in written}
        await self._calls.ack(sorted(written))

    async def _without_cancelled(self, done: list[Done]) -> list[Done]:
        """Leaves out what was cancelled with its run; a job cancelled alone counts."""
        if (await self._calls.view()).state not in ("cancelling", "cancelled"):
            return done
        cancelled = [one for one in done if one.outcome.state == "cancelled"]
        await self._drop([one.outcome for one in cancelled])
        self._window.remove([one.seq for one in cancelled])
        return [one for one in done if one.outcome.state != "cancelled"]

    async def _drop(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            await self._in_thread(self._sink.drop, outcomes)
            await self._calls.ack([outcome.seq for outcome in outcomes])
