"""What becomes of a worker whose group has lost a rank: it ends, its jobs go on."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from .bridge import EXIT_STUCK, Worker

if TYPE_CHECKING:
    from .rank_group import RankGroup


@asynccontextmanager
async def ending_with(group: "RankGroup | None", worker: Worker) -> AsyncIterator[None]:
    """Ends this process when its group loses a rank; ends the group after the block.

    Args:
        group: The ranks; None where this process is the whole worker.
        worker: Whose leases end with it.
    """
    if group is None:
        yield
        return
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[str] = loop.create_future()

    def settle(reason: str) -> None:
        if not lost.done():
            lost.set_result(reason)

    def tell(reason: str) -> None:
        loop.call_soon_threadsafe(settle, reason)

    group.ranks.on_lost(tell)
    watching = asyncio.create_task(_end(lost, worker), name="ranks")
    try:
        yield
    finally:
        watching.cancel()
        group.close()


async def _end(lost: "asyncio.Future[str]", worker: Worker) -> None:
    reason = await lost
    structlog.get_logger().error("group_lost", reason=reason)
    try:
        await worker.give_up(f"its group lost a rank: {reason}", counts=True)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(EXIT_STUCK)  # even where nobody reads what it prints any more
