"""Fixtures that every layer of tests shares."""

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

sys.path.insert(0, str(Path(__file__).parent))  # `support` without a package

from support.fake_group import FakeGroup
from support.servers import SERVERS, RedisServer, running
from support.shard_client import Shard

os.environ.setdefault("HF_HUB_OFFLINE", "1")

_HERE = Path(__file__).parent
_ALONE = {"faults": "faults", "browser": "browser", "kernels_gpu": "kernels"}
"""Folders whose files never run beside each other: each test there has pools of several
processes and counts on a core of its own, or all share what one long run gave."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Says to pytest-xdist (`--dist loadgroup`) what stays in one process: a file,
    which has fixtures of its own for all its tests, and the folders above.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        file = item.path.relative_to(_HERE)
        group = _ALONE.get(file.parts[0], str(file))
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session", params=SERVERS)
def redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A real server, once per supported version and session."""
    with running(request.param) as server:
        yield server


@pytest.fixture(scope="session")
def newest_redis(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """The newest supported server alone, for tests that need no second one."""
    with running(SERVERS[-1]) as server:
        yield server


@pytest.fixture
async def redis_client(
    redis_server: RedisServer,
) -> AsyncIterator["redis.asyncio.Redis[bytes]"]:
    """A client on an empty database."""
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
async def empty_redis(
    newest_redis: RedisServer,
) -> AsyncIterator["redis.asyncio.Redis[bytes]"]:
    """The same on the newest server, for tests that need no second one."""
    async with redis.asyncio.Redis.from_url(newest_redis.url) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def shard(empty_redis: "redis.asyncio.Redis[bytes]") -> Shard:
    """A shard on that server with a scheduler and one group, to be played by hand."""
    return await Shard(empty_redis).open("g1")


@pytest.fixture
async def group(
    empty_redis: "redis.asyncio.Redis[bytes]",
) -> AsyncIterator[FakeGroup]:
    """A worker group on that server that answers jobs by itself."""
    async with FakeGroup(empty_redis) as fake:
        yield fake
