"""arq's part: housekeeping on a timetable, apart from the hot path.

If this process is down, inference goes on; nothing here is waited for.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, cast

import arq
import msgspec
import redis.asyncio
import structlog
from arq.connections import ArqRedis
from arq.worker import Worker

from ..shared.config import Config
from ..shared.errors import ProtocolError
from ..shared.keys import JANITOR_QUEUE, Keys
from ..shared.redis import connect
from ..shared.script_types import DEAD_MS
from .books import mend_books
from .housekeeping import forget_groups, mend_orphans, shards, trim
from .old_inputs import remove_old
from .outage import REDIS_ERRORS, Outage

POLL_S: Final = 1.0
"""arq looks for due tasks this often; housekeeping is never urgent."""
TASK_S: Final = 600
"""Longest run of one task."""
MINUTES: Final = {0, 10, 20, 30, 40, 50}
"""When orphans are looked for: a scan of every key."""
DEAD_FIELD: Final = "dead_ms"
"""Of arq's context: how long dead letters are kept."""
_log = structlog.get_logger(__name__)


def _client(context: dict[str, object]) -> "redis.asyncio.Redis":
    return cast("redis.asyncio.Redis", context["redis"])


def _tell(event: str, keys: Keys, counts: Mapping[str, int]) -> None:
    """Logs what a task did; that it did nothing is of interest to few."""
    level = logging.INFO if any(counts.values()) else logging.DEBUG
    _log.log(level, event, shard=keys.shard, **counts)


async def trim_streams(context: dict[str, object]) -> None:
    """Removes old dead letters and terminal events of every shard."""
    client = _client(context)
    dead_ms = cast("int", context.get(DEAD_FIELD, DEAD_MS))
    for keys in await shards(client):
        try:
            _tell("trimmed", keys, await trim(client, keys, dead_ms))
        except ProtocolError as error:
            _log.error("not_trimmed", shard=keys.shard, error=str(error))


async def remove_groups(context: dict[str, object]) -> None:
    """Removes worker groups that are gone from every shard."""
    client = _client(context)
    for keys in await shards(client):
        _tell("groups_removed", keys, {"groups": await forget_groups(client, keys)})


async def find_orphans(context: dict[str, object]) -> None:
    """Mends what disagrees in every shard: jobs with their place, groups with jobs."""
    client = _client(context)
    for keys in await shards(client):
        _tell("orphans_mended", keys, await mend_orphans(client, keys))
        _tell("books_mended", keys, {"groups": await mend_books(client, keys)})


def _remove_inputs(config: Config) -> Callable[[dict[str, object]], Awaitable[None]]:
    async def remove_inputs(context: dict[str, object]) -> None:
        """Removes inputs from the store that no job names any more."""
        client = _client(context)
        removed = await remove_old(client, config)
        if removed:
            _log.info("inputs_removed", inputs=removed)

    return remove_inputs


def make_worker(url: str, config: Config) -> Worker:
    """Returns the arq worker that runs the timetable.

    Args:
        url: Redis of the pool.
        config: Its settings.
    """
    client = connect(url, socket_timeout_s=config.redis.socket_timeout_s)
    # msgpack, not pickle: what stands in Redis must not be able to run code here.
    serializers = {
        "job_serializer": msgspec.msgpack.encode,
        "job_deserializer": msgspec.msgpack.decode,
    }
    pool = ArqRedis(
        client.connection_pool,
        default_queue_name=JANITOR_QUEUE,
        **serializers,
    )
    return Worker(
        cron_jobs=[
            arq.cron(trim_streams, minute={5, 35}, run_at_startup=True),
            arq.cron(remove_groups, second=30, run_at_startup=True),
            arq.cron(find_orphans, minute=MINUTES, run_at_startup=True),
            arq.cron(
                _remove_inputs(config),
                name="remove_inputs",
                minute={20, 50},
                run_at_startup=True,
            ),
        ],
        queue_name=JANITOR_QUEUE,
        redis_pool=pool,
        ctx={DEAD_FIELD: round(config.retention.dead_s * 1000)},
        handle_signals=False,
        keep_result=0,
        max_tries=1,
        max_jobs=3,
        job_timeout=TASK_S,
        poll_delay=POLL_S,
        log_results=False,
        **serializers,
    )


async def supervise(url: str, config: Config) -> None:
    """Runs arq, and starts it again with backoff when it ends, until cancelled."""
    outage = Outage("janitor")
    while True:
        worker = make_worker(url, config)
        try:
            await worker.async_run()
        except REDIS_ERRORS as error:
            await outage.wait(error)
        except Exception as error:  # noqa: BLE001 - arq may raise what it likes
            _log.exception("janitor_failed")
            await outage.wait(error)
        finally:
            await _close(worker)
        if await _answers(url, config):
            outage.over()


async def _close(worker: Worker) -> None:
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


async def _answers(url: str, config: Config) -> bool:
    client = connect(url, socket_timeout_s=config.redis.socket_timeout_s)
    try:
        return bool(await client.ping())
    except REDIS_ERRORS as error:
        _log.debug("redis_still_away", error=str(error))
        return False
    finally:
        await client.aclose()


async def serve(url: str, config: Config) -> int:
    """Runs the janitor until SIGINT or SIGTERM.

    Args:
        url: Redis of the pool.
        config: Its settings.

    Returns:
        The exit status.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    _log.info("janitor_started")
    running = asyncio.create_task(supervise(url, config), name="arq")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if running.done():
        running.result()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    _log.info("janitor_stopped")
    return 0
