"""arq's part: housekeeping on a timetable, apart from the hot path.

If this process is down, inference goes on; nothing here is waited for.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, cast

import arq
import redis.asyncio
import structlog

from ..shared.config import Config
from ..shared.errors import ProtocolError
from ..shared.keys import JANITOR_QUEUE, Keys
from ..shared.metrics.serving import shown
from ..shared.redis import connect
from ..shared.script_types import DEAD_MS
from ..shared.tasks import end_tasks
from .arq_running import QuietWorker, arq_options, keep_running, run_worker
from .books import mend_books
from .bulk.running import supervise_bulk
from .history import Sampler
from .housekeeping import forget_groups, mend_orphans, shards, trim
from .old_inputs import remove_old
from .old_usage import remove_old_usage
from .shadow import Shadow
from .shown import RunGauges
from .webhook_service import run_webhooks
from .webhooks import Webhooks

POLL_S: Final = 1.0
"""Tasks that run or are due are looked at this often; none is urgent."""
TASK_S: Final = 600
"""Longest run of one task."""
MINUTES: Final = {0, 10, 20, 30, 40, 50}
"""When orphans are looked for: a scan of every key."""
DEAD_FIELD: Final = "dead_ms"
"""Of arq's context: how long dead letters are kept."""
USAGE_FIELD: Final = "usage_days"
"""Likewise: days of usage that are kept."""
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


async def trim_usage(context: dict[str, object]) -> None:
    """Removes what tenants have used long ago from every shard."""
    client, days = _client(context), cast("int", context[USAGE_FIELD])
    for keys in await shards(client):
        _tell("usage_trimmed", keys, await remove_old_usage(client, keys, days))


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


def make_worker(url: str, config: Config) -> QuietWorker:
    """Returns the arq worker that runs the timetable.

    Args:
        url: Redis of the pool.
        config: Its settings.
    """
    return QuietWorker(
        cron_jobs=[
            arq.cron(trim_streams, minute={5, 35}, run_at_startup=True),
            arq.cron(trim_usage, minute={25}, run_at_startup=True),
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
        ctx={
            DEAD_FIELD: round(config.retention.dead_s * 1000),
            USAGE_FIELD: config.retention.usage_days,
        },
        handle_signals=False,
        keep_result=0,
        max_tries=1,
        max_jobs=3,
        job_timeout=TASK_S,
        poll_delay=POLL_S,
        log_results=False,
        **arq_options(url, config, JANITOR_QUEUE),
    )


async def supervise(url: str, config: Config) -> None:
    """Runs arq, and starts it again with backoff when it ends, until cancelled."""

    async def start() -> None:
        await run_worker(make_worker(url, config))

    await keep_running("janitor", url, config, start)


@contextlib.asynccontextmanager
async def _watched(url: str, config: Config) -> AsyncIterator[None]:
    """Samples the pool's history and shows this process, apart from arq."""
    client = connect(url, socket_timeout_s=config.redis.socket_timeout_s)
    sampling = asyncio.create_task(Sampler(client).run(), name="history")
    try:
        async with shown(client, config, "janitor", ask=RunGauges(client)):
            yield
    finally:
        await end_tasks(sampling)
        await client.aclose()


async def _bulk(url: str, config: Config) -> None:
    """Advances bulk runs; what their reader hears of is told to webhooks as well, and
    copied to versions that are tried.
    """
    client = connect(url, socket_timeout_s=config.redis.socket_timeout_s)
    shadow = Shadow(client)
    looking = asyncio.create_task(shadow.run(), name="shadow")
    try:
        handlers = (Webhooks(client).on_done, shadow.on_done)
        await supervise_bulk(url, config, handlers, shadow.wants)
    finally:
        await end_tasks(looking)
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
    async with _watched(url, config):
        running = {
            asyncio.create_task(supervise(url, config), name="arq"),
            asyncio.create_task(_bulk(url, config), name="bulk"),
            asyncio.create_task(run_webhooks(url, config), name="webhooks"),
        }
        stopping = asyncio.create_task(stop.wait(), name="stop")
        done, _ = await asyncio.wait(
            {*running, stopping}, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        await end_tasks(*running, stopping)
    _log.info("janitor_stopped")
    return 0
