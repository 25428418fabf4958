"""Parts of the janitor are started again, and say truly whether Redis is away."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import redis.exceptions
import structlog
from support.waiting import wait_until

from tokenmill.scheduler import arq_running
from tokenmill.scheduler.arq_running import keep_running
from tokenmill.shared.config import Config
from tokenmill.shared.metrics.catalog import REDIS_AWAY

URL = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(arq_running, "SETTLE_S", 0.05)
    before = dict(REDIS_AWAY.values)
    yield
    REDIS_AWAY.replace(before)


class Part:
    """Fails as told, then runs for ever."""

    def __init__(self, *failures):
        self.failures = list(failures)
        self.starts = 0
        self.running = asyncio.Event()

    async def __call__(self):
        self.starts += 1
        if self.failures:
            raise self.failures.pop(0)
        self.running.set()
        await asyncio.Event().wait()


@asynccontextmanager
async def kept(part, monkeypatch, *, answers=(True,)):
    left = list(answers)

    async def answer(url, config):
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(arq_running, "_answers", answer)
    task = asyncio.create_task(keep_running("part", URL, Config(), part))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def away():
    return REDIS_AWAY.values.get((), 0)


async def test_an_outage_ends_once_the_part_runs_though_the_first_look_came_early(
    monkeypatch,
):
    part = Part(redis.exceptions.ConnectionError("gone"))
    begun = away()
    with structlog.testing.capture_logs() as logs:
        async with kept(part, monkeypatch, answers=(False, False, True)):
            await part.running.wait()
            assert away() == begun + 1
            await wait_until(lambda: away() == begun, what="the gauge back down")
    assert [line["event"] for line in logs] == ["redis_unreachable", "redis_back"]


async def test_what_redis_refuses_for_ever_is_said_once(monkeypatch):
    refused = redis.exceptions.NoPermissionError("no permission")
    part, begun = Part(*[refused] * 1000), away()
    with structlog.testing.capture_logs() as logs:
        async with kept(part, monkeypatch):
            await wait_until(lambda: part.starts > 3, what="further tries")
            assert away() == begun + 1
    assert [line["event"] for line in logs] == ["redis_unreachable"]


async def test_a_failure_of_ours_is_no_outage(monkeypatch):
    part, begun = Part(ValueError("ours")), away()
    with structlog.testing.capture_logs() as logs:
        async with kept(part, monkeypatch):
            await part.running.wait()
            assert away() == begun
    assert [line["event"] for line in logs] == ["part_failed"]
