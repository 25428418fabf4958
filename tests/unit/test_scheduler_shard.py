"""One shard's scheduler: what is left of a leadership that ended with an error."""

import asyncio

import pytest

from tokenmill.scheduler.shard import ShardScheduler
from tokenmill.scheduler.tokenizing import TokenizerThread
from tokenmill.shared.config import Config
from tokenmill.shared.errors import RedisUnavailable


class Leading(ShardScheduler):
    """Leads at once, until the first of its parts fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__(None, "tiny:0", Config(), TokenizerThread())  # type: ignore[arg-type]
        self._error = error
        self._leadership.wait = self._won  # type: ignore[method-assign]

    async def _won(self, answered: object) -> int:
        return 1

    async def _lead(self, fence: int) -> None:
        async with asyncio.TaskGroup() as parts:
            parts.create_task(asyncio.sleep(60))
            parts.create_task(self._fail())

    async def _fail(self) -> None:
        await asyncio.sleep(0)
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
            await asyncio.sleep(60)


async def test_a_leader_that_is_cancelled_ends() -> None:
    shard = Leading(RedisUnavailable("away"))
    shard._fail = lambda: asyncio.sleep(60)  # type: ignore[method-assign]
    running = asyncio.create_task(shard._once())
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
