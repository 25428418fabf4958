"""Fixtures that every layer of tests shares."""

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # `support` without a package

from support.fake_group import FakeGroup
from support.servers import SERVERS, RedisServer, running
from support.shard_client import Shard

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The same examples in every run, and none too slow: what fails here fails everywhere.
# Others than these are drawn with `--hypothesis-profile=explore`.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

_HERE = Path(__file__).parent
_ALONE = {"faults", "browser", "kernels_gpu"}
"""Folders whose files never run beside each other: each test there has pools of several
processes and counts on a core of its own, or all share what one long run gave."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws does not depend on which tests ran before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, keeps the folders above in one process as it does a file.

    `loadgroup` does not serve: it marks groups in the node ids, which no longer works
    with pytest 9.2 (pytest-xdist issue 1386).
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            parts = Path(file).relative_to(_HERE.name).parts
            return parts[0] if parts[0] in _ALONE else file

    return Scheduling(config, log)


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
    async with _emptied(redis_server) as client:
        yield client


@pytest.fixture
async def empty_redis(
    newest_redis: RedisServer,
) -> AsyncIterator["redis.asyncio.Redis[bytes]"]:
    """The same on the newest server, for tests that need no second one."""
    async with _emptied(newest_redis) as client:
        yield client


@asynccontextmanager
async def _emptied(
    server: RedisServer,
) -> AsyncIterator["redis.asyncio.Redis[bytes]"]:
    async with redis.asyncio.Redis.from_url(server.url) as client:
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
