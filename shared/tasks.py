"""Tasks of asyncio that belong to whoever started them: none outlives its owner."""

import asyncio
from typing import Any


async def end_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels tasks and waits until they are over, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_first_ends(*tasks: "asyncio.Task[Any]") -> None:
    """Waits until one task ends, then ends the others; also when it is cancelled.

    An exception of the one that ended is raised.
    """
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks(*tasks)
