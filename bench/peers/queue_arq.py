"""arq for bench/queue.py: msgpack in place of pickle, 100 jobs at once a worker."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.jobs import Job
from arq.worker import Worker
from queue_side import WORKERS, fast_loop, main

QUEUE = "bench:arq"
AT_ONCE = 50
"""Single enqueues that are in flight together; arq has none for many."""


async def echo(_context: dict[str, object], text: str) -> str:
    """A job that gives back what it was given."""
    return text


class Arq:
    """arq's client."""

    def __init__(self, pool: ArqRedis) -> None:
        self._pool = pool

    async def enqueue(self, texts: Sequence[str]) -> list[str]:
        """Enqueues a job for each text."""
        ids: list[str] = []
        for first in range(0, len(texts), AT_ONCE):
            some = texts[first : first + AT_ONCE]
            jobs = await asyncio.gather(
                *(self._pool.enqueue_job("echo", text) for text in some)
            )
            ids += [job.job_id for job in jobs if job is not None]
        return ids

    async def result(self, job_id: str) -> str:
        """Waits for a job's end."""
        job = Job(
            job_id,
            self._pool,
            _queue_name=QUEUE,
            _deserializer=msgspec.msgpack.decode,
        )
        return str(await job.result(timeout=300, poll_delay=0.05))


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Arq]:
    """Opens arq's client."""
    pool = await create_pool(
        RedisSettings.from_dsn(url),
        default_queue_name=QUEUE,
        job_serializer=msgspec.msgpack.encode,
        job_deserializer=msgspec.msgpack.decode,
    )
    yield Arq(pool)
    await pool.aclose()


def serve(url: str) -> None:
    """Runs one worker until the process is ended."""

    async def run() -> None:
        worker = Worker(
            functions=[echo],
            redis_settings=RedisSettings.from_dsn(url),
            queue_name=QUEUE,
            max_jobs=100,
            poll_delay=0.01,
            keep_result=300,
            handle_signals=False,
            job_serializer=msgspec.msgpack.encode,
            job_deserializer=msgspec.msgpack.decode,
        )
        await worker.async_run()

    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(run())


def work(url: str) -> None:
    """Runs the worker processes; this one and the others end together."""
    for _ in range(WORKERS - 1):
        multiprocessing.Process(target=serve, args=(url,), daemon=True).start()
    serve(url)


if __name__ == "__main__":
    main(opened, work)
