"""arq's own rate for jobs that do nothing, for comparison in bench/queue.py.

    queue_arq.py URL JOBS

The jobs are enqueued first; what is timed is one burst worker processing them.
"""

import asyncio
import json
import sys
import time

import msgspec
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker

QUEUE = "bench:arq"


async def noop(_context: dict[str, object]) -> None:
    """A job that does nothing."""


async def measure(url: str, count: int) -> None:
    """Enqueues the jobs, times a burst worker on them and prints the rates as JSON."""
    settings = RedisSettings.from_dsn(url)
    pool = await create_pool(
        settings,
        default_queue_name=QUEUE,
        job_serializer=msgspec.msgpack.encode,
        job_deserializer=msgspec.msgpack.decode,
    )
    began = time.perf_counter()
    for first in range(0, count, 50):
        await asyncio.gather(
            *(pool.enqueue_job("noop") for _ in range(first, min(first + 50, count)))
        )
    enqueue_s = time.perf_counter() - began
    worker = Worker(
        functions=[noop],
        redis_settings=settings,
        queue_name=QUEUE,
        burst=True,
        max_jobs=100,
        keep_result=0,
        poll_delay=0.01,
        handle_signals=False,
        job_serializer=msgspec.msgpack.encode,
        job_deserializer=msgspec.msgpack.decode,
    )
    began = time.perf_counter()
    await worker.async_run()
    elapsed = time.perf_counter() - began
    await worker.close()
    await pool.aclose()
    if worker.jobs_complete != count:
        raise SystemExit(f"arq processed {worker.jobs_complete} of {count} jobs")
    report = {
        "arq_jobs_per_s": round(count / elapsed),
        "arq_enqueues_per_s": round(count / enqueue_s),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    asyncio.run(measure(sys.argv[1], int(sys.argv[2])))
