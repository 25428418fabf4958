"""One shard's scheduler: what is left of a leadership that ended with an error."""

import asyncio

import pytest

from tokenmill.scheduler.shard import ShardScheduler
from tokenmill.scheduler.tokenizing import TokenizerThread
from tokenmill.shared.config import Config
from tokenmill.shared.errors import RedisUnavailable


async def forever() -> None:
    await asyncio.Event().wait()


class Leading(ShardScheduler):
    """Leads at once, until the first of its parts fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__(None, "tiny:0", Config(), TokenizerThread())  # type: ignore[arg-type]
        self._error = error
        self.leads = asyncio.Event()
        self._leadership.wait = self._won  # type: ignore[method-assign]

    async def _won(self, answered: object) -> int:
        return 1

    async def _lead(self, fence: int) -> None:
        async with asyncio.TaskGroup() as parts:
            parts.create_task(forever())
            parts.create_task(self._fail())

    async def _stay(self, fence: int) -> None:
        self.leads.set()
        await forever()

    async def _fail(self) -> None:
        self.leads.set()
        raise self._error


async def test_a_lost_leadership_leaves_no_cancellation_behind() -> None:
    """With one, timeouts of Python 3.11.2 cancel the task instead of ending."""
    shard = Leading(RedisUnavailable("away"))
    await shard._once()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await forever()


async def test_a_leader_that_is_cancelled_ends() -> None:
    shard = Leading(RedisUnavailable("away"))
    shard._lead = shard._stay  # type: ignore[method-assign]
    running = asyncio.create_task(shard._once())
    await shard.leads.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
