"""A gateway tells Prometheus that Redis is away, and that it is back."""

import pytest
import redis.asyncio
from support.servers import SERVERS, running

from tokenmill.producer.gateway.metrics import Reach
from tokenmill.shared.metrics.catalog import REDIS_AWAY


async def test_a_scrape_of_a_gateway_says_whether_redis_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(REDIS_AWAY, "values", {})
    with running(SERVERS[-1]) as server:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            reach = Reach(client)
            for expected in (0, 1, 1, 0):
                if expected:
                    server.kill()
                elif not server.answers():
                    server.start()
                await reach()
                assert REDIS_AWAY.values.get((), 0) == expected
