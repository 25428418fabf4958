"""An event loop on a thread of its own, for clients in code that has none."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from ..shared.errors import TokenmillError
from ..shared.tasks import end_tasks

T = TypeVar("T")


class LoopThread:
    """An event loop on a thread of its own, to which other threads hand work."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tokenmill-client", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it.

        Raises:
            TokenmillError: The loop is closed, or belongs to another process.
        """
        problem = self._problem()
        if problem is not None:
            work.close()
            raise TokenmillError(problem)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise TokenmillError("the client was closed during the call") from None
        except BaseException:
            # An interrupt of the waiting thread: the work must not go on unseen.
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancels what still runs and ends the thread."""
        if self._loop.is_closed() or self._pid != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _problem(self) -> str | None:
        if self._pid != os.getpid():
            return "the process forked after the client was opened; open one here"
        if self._loop.is_closed():
            return "the client is closed"
        if threading.current_thread() is self._thread:
            return "SyncClient was called on its own loop; use Client in async code"
        return None


async def _cancel_others() -> None:
    others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    await end_tasks(*others)
    await asyncio.get_running_loop().shutdown_asyncgens()
    for _ in range(2):
        await asyncio.sleep(0)  # transports that were closed tell their protocols
