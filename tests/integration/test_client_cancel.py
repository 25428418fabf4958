"""A task that talks to Redis ends when it is cancelled, at whatever moment."""

import asyncio

import pytest
from support.waiting import loop_turns

from tokenmill.shared.redis import connect


@pytest.mark.parametrize("steps", range(1, 40))
async def test_a_cancel_is_never_swallowed(newest_redis, steps: int) -> None:
    connection = connect(newest_redis.url)

    async def work() -> None:
        while True:
            await connection.execute_command("ZRANGE", "x", 0, -1)

    task = asyncio.ensure_future(work())
    await loop_turns(steps)
    task.cancel()
    done, pending = await asyncio.wait([task], timeout=30)
    for stubborn in pending:
        stubborn.cancel()
    assert task in done
    await connection.aclose()
