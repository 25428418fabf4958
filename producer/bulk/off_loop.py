"""Work on whole files, off the event loop: signals are heard while it goes on."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Check = Callable[[], None]
"""Called every few megabytes by what takes long; raises once nobody waits for it."""


class Stopped(Exception):
    """Nobody waits for this any more."""


def go_on() -> None:
    """The check of work that nobody stops."""


async def off_loop(work: Callable[[Check], T]) -> T:
    """Runs work on a thread of its own; when cancelled, stops it and awaits its end.

    Args:
        work: Takes the check that it is to call now and then.
    """
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise Stopped

    future = asyncio.get_running_loop().run_in_executor(None, work, check)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([future])
        future.exception()  # looked at: what it says matters to nobody
        raise
