"""Fixtures of tests that deliver webhooks.

A test module asks for them by `pytest_plugins = "support.webhook_fixtures"`.
"""

import ssl

import httpx
import pytest
import redis.asyncio

from .shard_client import Shard

TRUSTED = ssl.create_default_context()


@pytest.fixture
async def shard(newest_redis):
    client = redis.asyncio.Redis.from_url(newest_redis.url)
    await client.flushall()
    yield await Shard(client).open("g1")
    await client.aclose()


@pytest.fixture(autouse=True)
def trusted(request, monkeypatch):
    """Reading the system's certificates takes longer than all else here."""
    if "certificates" not in request.fixturenames:
        monkeypatch.setattr(httpx, "create_ssl_context", lambda: TRUSTED)
