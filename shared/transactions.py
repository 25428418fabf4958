"""A transaction of Redis whose connection comes back whatever befalls its user."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import redis.asyncio


@asynccontextmanager
async def transaction(
    client: "redis.asyncio.Redis",
) -> AsyncIterator["redis.asyncio.client.Pipeline"]:
    """Yields a pipeline that may watch keys.

    Args:
        client: Redis.
    """
    pipeline = client.pipeline(transaction=True)
    try:
        yield pipeline
    finally:
        # Cancelled amid its UNWATCH it would keep the connection for ever.
        await asyncio.shield(pipeline.reset())  # type: ignore[no-untyped-call]
