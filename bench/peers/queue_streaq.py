"""streaQ for bench/queue.py: batches enqueued in one pipeline, uvloop, silent tasks.

Its clients and workers are asyncio's (anyio), with uvloop, as its documentation has it
for speed; results come back as its `Worker.result_by_id` reads them.
"""

import json
import multiprocessing
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from queue_side import WORKERS, main
from streaq import Worker


def dumps(value: object) -> str:
    """Serializes without pickle's cost."""
    return json.dumps(value)


def new_worker(url: str) -> "Worker[None]":
    """A worker, which is streaQ's client as well."""
    return Worker(
        redis_url=url,
        queue_name="bench",
        concurrency=100,
        serializer=dumps,
        deserializer=json.loads,
        handle_signals=False,
        anyio_kwargs={"use_uvloop": True},
    )


class Streaq:
    """streaQ's client."""

    def __init__(self, worker: "Worker[None]") -> None:
        self._worker = worker
        self._task = worker.task(name="echo", silent=True)(echo)

    async def enqueue(self, texts: Sequence[str]) -> list[str]:
        """Enqueues all in one pipeline."""
        tasks = [self._task.enqueue(text) for text in texts]
        await self._worker.enqueue_many(tasks)
        return [task.id for task in tasks]

    async def result(self, job_id: str) -> str:
        """Waits for a job's end."""
        done = await self._worker.result_by_id(job_id, timeout=300)
        return str(done.result)


async def echo(text: str) -> str:
    """A job that gives back what it was given."""
    return text


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Streaq]:
    """Opens streaQ's client."""
    worker = new_worker(url)
    async with worker:
        yield Streaq(worker)


def serve(url: str) -> None:
    """Runs one worker until the process is ended."""
    worker = new_worker(url)
    worker.task(name="echo", silent=True)(echo)
    worker.run_sync()


def work(url: str) -> None:
    """Runs the worker processes; this one and the others end together."""
    for _ in range(WORKERS - 1):
        multiprocessing.Process(target=serve, args=(url,), daemon=True).start()
    serve(url)


if __name__ == "__main__":
    main(opened, work)
