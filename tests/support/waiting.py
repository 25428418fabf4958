"""Waiting for something to become true, instead of sleeping and hoping."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable


async def wait_until(
    condition: Callable[[], object | Awaitable[object]],
    *,
    timeout_s: float = 10.0,
    every_s: float = 0.01,
    what: str = "the condition",
) -> object:
    """Polls `condition` (plain or async) and returns its first true value."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not become true in {timeout_s} s")
        await asyncio.sleep(every_s)


async def loop_turns(count: int = 1) -> None:
    """Lets every task that is ready now run, `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


def wait_until_sync(
    condition: Callable[[], object],
    *,
    timeout_s: float = 10.0,
    every_s: float = 0.02,
    what: str = "the condition",
) -> object:
    """The same for code without an event loop."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not become true in {timeout_s} s")
        time.sleep(every_s)


async def ticks(every_s: float) -> AsyncIterator[None]:
    """Comes round again and again: load that goes on until its task is cancelled."""
    while True:
        yield
        await asyncio.sleep(every_s)
