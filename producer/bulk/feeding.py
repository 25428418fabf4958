"""From the source into Redis, as far as the window has room."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from ...shared.errors import TokenmillError
from .flow import Entry, Fed, Refused, Sink, Source
from .store_calls import StoreCalls
from .window import Window

BATCH: Final = 200
"""Entries read and fed at a time: enough to make the round trip cheap."""
BATCH_BYTES: Final = 4 * 1024 * 1024

InThread = Callable[..., Awaitable[Any]]
"""Runs a function on the thread that source and sink live on."""


class Feeder:
    """Feeds a run.

    Args:
        calls: The run's store.
        source: Where entries come from.
        sink: Where the lines of refused ones go.
        window: What is in the pool.
        in_thread: Runs a function on the thread of source and sink.
    """

    def __init__(
        self,
        calls: StoreCalls,
        source: Source,
        sink: Sink,
        window: Window,
        in_thread: InThread,
    ) -> None:
        self._calls = calls
        self._source = source
        self._sink = sink
        self._window = window
        self._in_thread = in_thread
        self._broken: TokenmillError | None = None
        self.num_items = 0
        """Items taken from the source by this process."""
        self.is_done = False
        """Nothing more will be fed."""
        self.is_closed = False
        """The run was cancelled, so nothing more is taken."""

    @property
    def broken(self) -> TokenmillError | None:
        """Why the source gave no more, if that was before its end."""
        return self._broken

    async def run(self) -> None:
        """Feeds until the source ends or the run is cancelled."""
        entries = self._source.entries()
        while not self.is_closed:
            batch = await self._in_thread(self.take, entries)
            if not batch:
                break
            await self._place(batch)
        self.is_done = True
        if not self.is_closed:
            await self.say_total()

    async def say_total(self) -> None:
        """Tells Redis that there are no more items: the source came to its end."""
        if self._broken is None:
            await self._calls.set_total()

    def close(self) -> None:
        """Stops feeding: the run is cancelled."""
        self.is_closed = True
        self._window.wake()

    async def feed_again(self) -> int:
        """Feeds what is in the window once more; Redis knows what it still has.

        Returns:
            How many items it had forgotten.
        """
        forgotten = 0
        for part in list(_parts(self._window.all())):
            async with self._window.leaving:
                left = [fed for fed in part if self._window.get(fed.seq) is fed]
                forgotten += await self._feed(left)
        return forgotten

    def take(self, entries: Iterator[Entry]) -> list[Entry]:
        """Reads the next few entries; none at the end, or where the source broke off.

        Args:
            entries: The source's.
        """
        batch: list[Entry] = []
        size = 0
        try:
            while len(batch) < BATCH and size < BATCH_BYTES:
                entry = next(entries, None)
                if entry is None:
                    break
                batch.append(entry)
                size += entry.size if isinstance(entry, Fed) else 0
        except TokenmillError as error:
            self._broken = error
        return batch

    async def _place(self, batch: list[Entry]) -> None:
        refused = [entry for entry in batch if isinstance(entry, Refused)]
        if refused:
            await self._in_thread(self._sink.write, refused)
        part: list[Fed] = []
        for fed in batch:
            if isinstance(fed, Refused):
                continue
            while not self.is_closed and not self._window.has_room(fed.size):
                if part:  # what waits here must not wait for its own room
                    await self._feed(part)
                    part = []
                else:
                    await self._window.change()
            if self.is_closed:
                break
            self._window.add(fed)
            part.append(fed)
            self.num_items += 1
        await self._feed(part)

    async def _feed(self, part: list[Fed]) -> int:
        if not part:
            return 0
        statuses = await self._calls.feed([fed.item for fed in part])
        if "closed" in statuses:
            shut = zip(part, statuses, strict=True)
            self._window.remove([f.seq for f, status in shut if status == "closed"])
            self.close()
        return statuses.count("new")


def _parts(items: list[Fed]) -> Iterator[list[Fed]]:
    part: list[Fed] = []
    size = 0
    for fed in items:
        if part and (len(part) >= BATCH or size + fed.size > BATCH_BYTES):
            yield part
            part, size = [], 0
        part.append(fed)
        size += fed.size
    if part:
        yield part
