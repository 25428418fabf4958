"""Time-outs that work while a task is being cancelled, on Python 3.11.0 to 3.11.2.

There, `asyncio.timeout` in a task with a cancellation outstanding lets the
cancellation out where later versions raise `TimeoutError` (CPython gh-102780, cured in
3.11.3). What a command does after a signal, such as cancelling its job, then ends
half-way: redis-py uses time-outs of 0.
"""

import asyncio
import sys
from types import TracebackType
from typing import Final
from weakref import WeakKeyDictionary

AFFECTED: Final = sys.version_info < (3, 11, 3)
"""Whether this interpreter has the fault."""


def repair_timeouts() -> None:
    """Makes `asyncio.timeout` count the cancellations that were there before it.

    Only for processes of our own: it changes a class of the standard library. Without
    effect on interpreters that do not have the fault.
    """
    if not AFFECTED:
        return
    before: WeakKeyDictionary[asyncio.Timeout, int] = WeakKeyDictionary()
    true_enter, true_exit = asyncio.Timeout.__aenter__, asyncio.Timeout.__aexit__

    async def enter(self: asyncio.Timeout) -> asyncio.Timeout:
        before[self] = _cancellations()
        return await true_enter(self)

    async def leave(
        self: asyncio.Timeout,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await true_exit(self, kind, error, trace)
        ours = _cancellations() <= before[self]
        if kind is asyncio.CancelledError and self.expired() and ours:
            raise TimeoutError from error

    setattr(asyncio.Timeout, "__aenter__", enter)  # noqa: B010 - a method of another's
    setattr(asyncio.Timeout, "__aexit__", leave)  # noqa: B010


def _cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
