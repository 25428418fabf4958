"""taskiq-redis for bench/queue.py: its stream broker, which acknowledges, and msgpack.

Its workers are started by its own command, which takes uvloop where it is installed;
this module is what they import, with the address in `TOKENMILL_BENCH_URL`.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from queue_side import WORKERS, main
from taskiq import AsyncTaskiqTask
from taskiq.serializers import MSGPackSerializer
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

VARIABLE = "TOKENMILL_BENCH_URL"
AT_ONCE = 100
"""Single enqueues that are in flight together; taskiq has none for many."""


def new_broker(url: str) -> RedisStreamBroker:
    """A broker with its results on the same server."""
    results: RedisAsyncResultBackend[str] = RedisAsyncResultBackend(
        url,
        result_ex_time=300,
        serializer=MSGPackSerializer(),
        max_connection_pool_size=AT_ONCE,
    )
    return RedisStreamBroker(
        url,
        queue_name="bench:taskiq",
        consumer_id="0",
        max_connection_pool_size=AT_ONCE,
        xread_count=100,
    ).with_result_backend(results)


broker = new_broker(os.environ.get(VARIABLE, "redis://127.0.0.1:6379/0"))


@broker.task(task_name="echo")
async def echo(text: str) -> str:
    """A job that gives back what it was given."""
    return text


class Taskiq:
    """taskiq's client."""

    async def enqueue(self, texts: Sequence[str]) -> list[str]:
        """Enqueues a job for each text."""
        ids: list[str] = []
        for first in range(0, len(texts), AT_ONCE):
            some = texts[first : first + AT_ONCE]
            tasks = await asyncio.gather(*(echo.kiq(text) for text in some))
            ids += [task.task_id for task in tasks]
        return ids

    async def result(self, job_id: str) -> str:
        """Waits for a job's end."""
        task = AsyncTaskiqTask[str](job_id, broker.result_backend)
        done = await task.wait_result(check_interval=0.05, timeout=300)
        return str(done.return_value)


@asynccontextmanager
async def opened(_url: str) -> AsyncIterator[Taskiq]:
    """Opens taskiq's client on the broker of this module."""
    await broker.startup()
    yield Taskiq()
    await broker.shutdown()


def work(url: str) -> None:
    """Runs the worker processes with taskiq's own command."""
    command = [sys.executable, "-m", "taskiq", "worker", "queue_taskiq:broker"]
    command += ["--workers", str(WORKERS), "--max-async-tasks", "100"]
    command += ["--log-level", "WARNING"]
    folder = str(Path(__file__).parent)
    os.chdir(folder)
    os.environ |= {VARIABLE: url, "PYTHONPATH": folder}
    # In place of this process, so that its end ends the workers.
    os.execv(command[0], command)


if __name__ == "__main__":
    main(opened, work)
