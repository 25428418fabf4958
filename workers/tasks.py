"""Tasks that live as long as a worker."""

import asyncio
from collections.abc import Coroutine


def started(work: Coroutine[object, object, object], name: str) -> "asyncio.Task[None]":
    """Starts a task.

    Args:
        work: What it does.
        name: How logs and debuggers know it.
    """

    async def run() -> None:
        await work

    return asyncio.create_task(run(), name=name)


async def first_of(*tasks: "asyncio.Task[None]") -> None:
    """Waits until one ends; an exception in any is raised here."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        if not task.cancelled():
            task.result()
