"""arq's workers: their connection, their end, and starting them again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog
from arq.connections import ArqRedis
from arq.worker import Worker

from ..shared.config import Config
from ..shared.redis import connect
from .outage import REDIS_ERRORS, Outage

_log = structlog.get_logger(__name__)


def arq_options(url: str, config: Config, queue: str) -> dict[str, Any]:
    """Returns what an arq worker needs to reach Redis.

    msgpack, not pickle: what stands in Redis must not be able to run code here.

    Args:
        url: Redis of the pool.
        config: Its settings.
        queue: Name of the worker's queue.
    """
    serializers = {
        "job_serializer": msgspec.msgpack.encode,
        "job_deserializer": msgspec.msgpack.decode,
    }
    client = connect(url, socket_timeout_s=config.redis.socket_timeout_s)
    pool = ArqRedis(client.connection_pool, default_queue_name=queue, **serializers)
    return {"redis_pool": pool, **serializers}


async def run_worker(worker: Worker) -> None:
    """Runs an arq worker until it fails or is cancelled, and closes it."""
    try:
        await worker.async_run()
    finally:
        await close(worker)


async def close(worker: Worker) -> None:
    """Ends arq's tasks and connections; its own `close` stops at a cancelled task."""
    tasks = [*worker.tasks.values()]
    if worker.main_task is not None:
        tasks.append(worker.main_task)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    try:
        await worker.pool.delete(worker.health_check_key)
    except REDIS_ERRORS as error:
        _log.debug("health_key_left", error=str(error))
    await worker.pool.aclose(close_connection_pool=True)


async def keep_running(
    name: str, url: str, config: Config, start: Callable[[], Awaitable[None]]
) -> None:
    """Runs something, and starts it again with backoff when it ends, until cancelled.

    Args:
        name: For the log.
        url: Redis of the pool.
        config: Its settings.
        start: Runs it until it fails.
    """
    outage = Outage(name)
    while True:
        try:
            await start()
        except REDIS_ERRORS as error:
            await outage.wait(error)
        except Exception as error:  # noqa: BLE001 - arq may raise what it likes
            _log.exception(f"{name}_failed")
            await outage.wait(error)
        if await _answers(url, config):
            outage.over()


async def _answers(url: str, config: Config) -> bool:
    client = connect(url, socket_timeout_s=config.redis.socket_timeout_s)
    try:
        return bool(await client.ping())
    except REDIS_ERRORS as error:
        _log.debug("redis_still_away", error=str(error))
        return False
    finally:
        await client.aclose()
