"""What a worker needs of whatever holds adapters in memory, and calls off its loop."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, TypeVar

from ..shared.errors import ModelLoadError
from .engine.adapters.checkpoint import AdapterFacts
from .engine.adapters.source import AdapterStats as AdapterStats

NONE: Final = AdapterStats(loaded=0, leased=0, bytes=0, budget=0, loads=0, evictions=0)
"""Of a worker that serves no adapters."""
_T = TypeVar("_T")


class Held(Protocol):
    """An adapter that stays in memory until it is let go."""

    def release(self) -> None:
        """Lets it go; more than once is harmless."""
        ...


class AdapterLoader(Protocol):
    """Adapters of one engine; its methods may be called from any thread."""

    def load(self, key: str, path: Path, digest: str) -> Held:
        """Brings an adapter into memory, or finds it there; takes as long as it takes.

        Args:
            key: What requests of the engine name it by.
            path: Directory of its checkpoint.
            digest: Of the files that it must have.

        Raises:
            ModelLoadError: It is missing, changed, damaged, or of another base.
            AdapterUnavailable: All memory for adapters is in use now.
        """
        ...

    def check(self, path: Path) -> AdapterFacts:
        """Reads a checkpoint as `load` would, and keeps nothing.

        Raises:
            ModelLoadError: It could not be served; the message says why.
        """
        ...

    def stats(self) -> AdapterStats:
        """What is in memory, and what has been."""
        ...


class NoAdapters:
    """Stands where a worker serves no adapters, and says why.

    Args:
        reason: Completes "this worker serves none: ".
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def load(self, key: str, path: Path, digest: str) -> Held:  # noqa: ARG002
        """Refuses."""
        raise self._refusal()

    def check(self, path: Path) -> AdapterFacts:  # noqa: ARG002
        """Refuses."""
        raise self._refusal()

    def stats(self) -> AdapterStats:
        """Nothing of anything."""
        return NONE

    def _refusal(self) -> ModelLoadError:
        return ModelLoadError(f"this worker serves none: {self.reason}")


def too_slow(limit_s: float) -> ModelLoadError:
    """Returns what to say of files that do not come.

    Args:
        limit_s: How long they were waited for.
    """
    return ModelLoadError(
        f"its files did not come within {limit_s:g} s (worker.step_timeout_s); look at "
        "the file system of this host"
    )


async def off_loop(work: Callable[[], _T]) -> _T:
    """Runs something long in a daemon thread, which no exit waits for.

    A read from a file system that is away would otherwise keep the process alive.

    Args:
        work: Called once.

    Returns:
        What it returns; what it raises is raised here.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:  # noqa: BLE001 - raised again on the loop
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop is closed: the process is ending and nobody listens

    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(run,), name="adapter", daemon=True
    ).start()
    return await future
