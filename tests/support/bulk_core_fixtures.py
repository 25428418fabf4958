"""Redis for runs that a test moves on by hand, and the jobs of a pool as they see it.

A test module asks for them by `pytest_plugins = "support.bulk_core_fixtures"`.
"""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from tokenmill.shared.redis import connect

from .bulk_jobs import Jobs
from .servers import RedisServer


@pytest.fixture
async def client(newest_redis: RedisServer) -> AsyncIterator["redis.asyncio.Redis"]:
    """A client of ours on an empty database."""
    made = connect(newest_redis.url)
    await made.flushall()
    yield made
    await made.aclose()


@pytest.fixture
async def jobs(client: "redis.asyncio.Redis") -> Jobs:
    """Jobs of a model that the pool knows."""
    made = Jobs(client)
    await made.publish()
    return made
