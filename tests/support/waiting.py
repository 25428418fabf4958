"""Waiting for something to become true, instead of sleeping and hoping."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

PATIENCE_S = 60.0
"""Of a test in something that must come about. No claim of the pool's speed: a machine
with ten times the load takes ten times as long, and who passes does not wait."""

Condition = Callable[[], object | Awaitable[object]]


async def wait_until(
    condition: Condition,
    *,
    timeout_s: float = PATIENCE_S,
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


async def stays(condition: Condition, for_s: float, *, what: str) -> None:
    """Holds that `condition` (plain or async) is true all this time."""
    end = time.monotonic() + for_s

    async def is_over() -> bool:
        value = condition()
        assert await value if inspect.isawaitable(value) else value, what
        return time.monotonic() > end

    await wait_until(is_over, timeout_s=for_s + PATIENCE_S, what="the end of the look")


async def nap(seconds: float) -> None:
    """Lets so much time go by: what something that a test plays takes."""
    await asyncio.sleep(seconds)


async def loop_turns(count: int = 1) -> None:
    """Lets every task that is ready now run, `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


def wait_until_sync(
    condition: Callable[[], object],
    *,
    timeout_s: float = PATIENCE_S,
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


class Delay:
    """By how much the machine holds up whoever wants to run, for bounds of time.

    `async with Delay() as delay` takes short naps beside the test and adds up by how
    much each was too long: nothing to speak of on a quiet machine.
    """

    _NAP_S = 0.02
    _SHARE = 3.0
    """A chain of processes waits for its turn several times where a nap does once."""

    def __init__(self) -> None:
        self._lost_s = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._nap())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def allowance_s(self) -> float:
        """What a bound may be exceeded by."""
        return self._SHARE * self._lost_s

    async def _nap(self) -> None:
        before = time.monotonic()
        async for _ in ticks(self._NAP_S):
            now = time.monotonic()
            self._lost_s += max(0.0, now - before - 2 * self._NAP_S)
            before = now
