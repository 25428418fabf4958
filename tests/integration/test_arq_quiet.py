"""arq's worker asks Redis when there is something to do, not all the time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import arq
import pytest
from support.servers import RedisServer
from support.waiting import wait_until

from tokenmill.scheduler import arq_running
from tokenmill.scheduler.arq_running import (
    QuietWorker,
    arq_options,
    run_worker,
    wake,
)
from tokenmill.shared.config import Config

QUEUE = "tm:arq:test"
POLL_S = 0.02


class Counting(QuietWorker):
    """Counts how often it asks Redis."""

    polls = 0

    async def _poll_iteration(self) -> None:
        self.polls += 1
        await super()._poll_iteration()


@contextlib.asynccontextmanager
async def running(url: str, ran: list[str]) -> AsyncIterator[Counting]:
    async def work(_context: dict[str, object], name: str) -> None:
        ran.append(name)

    worker = Counting(
        functions=[arq.func(work, name="work")],
        queue_name=QUEUE,
        handle_signals=False,
        keep_result=0,
        poll_delay=POLL_S,
        **arq_options(url, Config(), QUEUE),
    )
    task = asyncio.create_task(run_worker(worker))
    try:
        await wait_until(lambda: worker.polls > 0)
        yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_queued_here_is_run_at_once(
    newest_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(arq_running, "IDLE_S", 600.0)
    ran: list[str] = []
    async with running(newest_redis.url, ran) as worker:
        await worker.pool.enqueue_job("work", "a")
        wake("tm:arq:another")
        wake(QUEUE)
        await wait_until(lambda: ran == ["a"])


async def test_a_task_for_later_is_waited_for(
    newest_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(arq_running, "IDLE_S", 600.0)
    ran: list[str] = []
    async with running(newest_redis.url, ran) as worker:
        before = worker.polls
        await worker.pool.enqueue_job("work", "later", _defer_by=0.5)
        wake(QUEUE)
        await wait_until(lambda: ran == ["later"])
        assert worker.polls - before < 0.5 / POLL_S / 2


async def test_what_another_process_queued_is_found(
    newest_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(arq_running, "IDLE_S", 0.1)
    ran: list[str] = []
    async with running(newest_redis.url, ran) as worker:
        await worker.pool.enqueue_job("work", "theirs")
        await wait_until(lambda: ran == ["theirs"])
