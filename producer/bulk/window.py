"""What is in the pool now: bounded in items and bytes, so that memory is constant."""

import asyncio
from collections.abc import Sequence
from typing import Final

from .flow import Fed

MAX_ITEMS: Final = 1000
"""Items in the pool: enough for every group to have full batches for seconds."""
MAX_BYTES: Final = 32 * 1024 * 1024
"""Bytes of them. One item that is larger goes alone."""


class Window:
    """Items that were fed and whose lines are not written.

    Args:
        max_items: Most of them.
        max_bytes: Most bytes of them.
    """

    def __init__(self, max_items: int = MAX_ITEMS, max_bytes: int = MAX_BYTES) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: dict[int, Fed] = {}
        self._bytes = 0
        self._changed = asyncio.Event()
        self.leaving = asyncio.Lock()
        """Held while items leave window and Redis, which is one step for whoever feeds
        again what is in the window: an item that left Redis would come as a new one."""

    def __len__(self) -> int:
        return len(self._items)

    def get(self, seq: int) -> Fed | None:
        """Returns the item if it is in the pool."""
        return self._items.get(seq)

    def all(self) -> list[Fed]:
        """Returns all of them, the oldest first."""
        return list(self._items.values())

    def add(self, fed: Fed) -> None:
        """Takes an item in; `room` was awaited before."""
        self._items[fed.seq] = fed
        self._bytes += fed.size

    def remove(self, seqs: Sequence[int]) -> None:
        """Lets items go, and wakes who waits for room."""
        for seq in seqs:
            fed = self._items.pop(seq, None)
            self._bytes -= 0 if fed is None else fed.size
        self._changed.set()

    def has_room(self, size: int) -> bool:
        """Whether an item of so many bytes may come in."""
        if not self._items:
            return True
        fits = self._bytes + size <= self._max_bytes
        return fits and len(self._items) < self._max_items

    async def change(self) -> None:
        """Waits until items were let go, or `wake` was called."""
        self._changed.clear()
        await self._changed.wait()

    def wake(self) -> None:
        """Makes those who wait look again."""
        self._changed.set()
