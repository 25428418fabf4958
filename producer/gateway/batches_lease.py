"""Who works on a batch: exactly one gateway, until it is not heard of for a while.

The lease stands in the record itself, so a gateway that lost it can change nothing.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from ...shared.errors import LeaseLost
from ...shared.file_keys import batch_key, batches_key
from ...shared.messages import Usage
from ..bulk.flow import Progress
from .batches_models import BatchRecord
from .owned_records import OwnedRecords

if TYPE_CHECKING:
    from ..session import Session

_RENEWALS: Final = 3
"""In the time of a lease."""
_TELL_S: Final = 1.0
"""Least time between two changes of what is done."""
Change = Callable[[BatchRecord, int], BatchRecord]
"""Given the record and the time of Redis in ms, returns the new one."""


def batch_records(session: "Session") -> OwnedRecords[BatchRecord]:
    """Returns the records of batches."""
    return OwnedRecords(session, BatchRecord, batch_key, batches_key)


async def claim(
    session: "Session", batch_id: str, driver: str, lease_ms: int
) -> "BatchLease | None":
    """Takes a batch that nobody works on.

    Args:
        session: The client's connections.
        batch_id: Which.
        driver: Names this gateway, unlike any other.
        lease_ms: How long it is held without a sign of life.

    Returns:
        The lease, or None where another gateway has it or it is no more.
    """

    def take(record: BatchRecord, now_ms: int) -> BatchRecord | None:
        if record.driver not in ("", driver) and record.driver_until_ms > now_ms:
            return None
        return msgspec.structs.replace(
            record, driver=driver, driver_until_ms=now_ms + lease_ms
        )

    record = await batch_records(session).change(batch_id, take)
    if record is None or record.driver != driver:
        return None
    return BatchLease(session, record, lease_ms)


class BatchLease:
    """One batch in this gateway's hands.

    Args:
        session: The client's connections.
        record: Just claimed.
        lease_ms: As claimed.
    """

    def __init__(self, session: "Session", record: BatchRecord, lease_ms: int) -> None:
        self._records = batch_records(session)
        self._driver = record.driver
        self._lease_ms = lease_ms
        self._look = asyncio.Event()
        self._moved = asyncio.Event()
        self._progress: Progress | None = None
        self._usage: Usage | None = None
        self._keep(record, record.driver_until_ms - lease_ms)

    def note(self, progress: Progress) -> None:
        """Keeps what is done so far; soon or with the next renewal it is told."""
        self._progress = progress
        told = (self.record.completed, self.record.failed)
        is_news = told != (progress.succeeded, progress.failed)
        if is_news and time.monotonic() - self._at > _TELL_S:
            self._look.set()

    def note_usage(self, usage: Usage) -> None:
        """Keeps what tokens were used, for the next change."""
        self._usage = usage

    def look(self) -> None:
        """Renews now: something was asked for."""
        self._look.set()

    @property
    def is_late(self) -> bool:
        """Whether the batch's time is over, by the clock of Redis."""
        passed_ms = (time.monotonic() - self._at) * 1000
        return self._now_ms + passed_ms >= self.record.expires_ms

    async def change(self, change: Change) -> None:
        """Changes the record, and renews the lease with it.

        Raises:
            LeaseLost: It is not ours any more.
        """
        found_ms = 0
        made: BatchRecord | None = None

        def ours(record: BatchRecord, now_ms: int) -> BatchRecord | None:
            nonlocal found_ms, made
            found_ms = now_ms
            if record.driver != self._driver:
                return None
            new = change(self._with_progress(record), now_ms)
            until_ms = 0 if new.has_ended else now_ms + self._lease_ms
            driver = "" if new.has_ended else self._driver
            made = msgspec.structs.replace(new, driver=driver, driver_until_ms=until_ms)
            return made

        record = await self._records.change(self.record.id, ours)
        # Nobody's: we have just ended it, and the answer to that was lost...
        is_ours = record is not None and (
            record.driver == self._driver or record == made
        )
        if record is None or not is_ours:  # ...or another gateway has
            raise LeaseLost(f"another gateway works on {self.record.id} now")
        self._keep(record, found_ms)

    async def keep(self) -> None:
        """Renews the lease for ever.

        Raises:
            LeaseLost: It is not ours any more.
        """
        while True:
            await happens(self._look, self._lease_ms / 1000 / _RENEWALS)
            self._look.clear()
            await self.change(lambda record, _now: record)

    async def until_over(self) -> None:
        """Waits until the batch is to be cancelled, or its time is over."""
        while self.record.cancelling_ms is None and not self.is_late:
            self._moved.clear()
            left_s = (self.record.expires_ms - self._now_ms) / 1000
            await happens(self._moved, min(max(left_s, 0.01), 60.0))

    async def release(self) -> None:
        """Lets another gateway have the batch at once."""
        await self._records.change(
            self.record.id,
            lambda record, _now: (
                msgspec.structs.replace(record, driver="", driver_until_ms=0)
                if record.driver == self._driver
                else None
            ),
        )

    def _with_progress(self, record: BatchRecord) -> BatchRecord:
        changes: dict[str, object] = {}
        if self._progress is not None:
            changes["completed"] = self._progress.succeeded
            changes["failed"] = self._progress.failed
        if self._usage is not None:
            changes["usage"] = self._usage
        return msgspec.structs.replace(record, **changes) if changes else record

    def _keep(self, record: BatchRecord, now_ms: int) -> None:
        self.record = record
        self._now_ms, self._at = now_ms, time.monotonic()
        self._moved.set()


async def happens(event: asyncio.Event, timeout_s: float) -> None:
    """Waits for an event, but not for longer than this."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
