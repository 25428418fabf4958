"""The deliveries of webhooks in the janitor process: arq's worker, kept running."""

import asyncio
from functools import partial
from typing import Final, cast

import arq
import redis.asyncio
import structlog

from ..shared.config import Config
from ..shared.tasks import until_first_ends
from ..shared.webhook_keys import QUEUE
from .arq_running import QuietWorker, arq_options, keep_running, run_worker
from .outage import REDIS_ERRORS
from .webhook_delivery import Deliverer
from .webhook_hosts import Hosts, TurnsWorker
from .webhook_transport import Poster
from .webhook_turns import Turns
from .webhooks import TASK, Webhooks

POLL_S: Final = 0.25
"""Deliveries that run or are due are looked at this often."""
MOST_AT_ONCE: Final = 96
"""Attempts of one janitor; below the most connections of `webhook_transport`."""
MARGIN_S: Final = 5.0
"""Of a task, beside the attempt itself: what it reads and writes in Redis."""
BLOCK_MS: Final = 2000
"""How long is waited for an announcement; below any sensible socket time-out."""
SWEEP_S: Final = 60.0
"""Between two looks for what should have been delivered."""
REDIS_WAIT_S: Final = 1.0
BROKEN_WAIT_S: Final = 60.0
"""Before the next try after Redis failed, or we did."""
DELIVERER: Final = "deliverer"
"""Of arq's context."""
_log = structlog.get_logger(__name__)


async def deliver(context: dict[str, object], event_id: str) -> None:
    """A task of arq: one attempt.

    Raises:
        arq.Retry: It is to be tried again.
    """
    deliverer = cast("Deliverer", context[DELIVERER])
    try:
        wait_s = await deliverer.attempt(event_id)
    except REDIS_ERRORS as error:
        _log.warning("webhook_not_noted", event_id=event_id, error=str(error))
        wait_s = REDIS_WAIT_S
    except Exception:  # noqa: BLE001 - arq would take any other error for the end
        _log.exception("webhook_broken", event_id=event_id)
        wait_s = BROKEN_WAIT_S
    if wait_s is not None:
        raise arq.Retry(defer=wait_s)


def make_worker(url: str, config: Config, poster: Poster) -> QuietWorker:
    """Returns the arq worker that delivers.

    Args:
        url: Redis of the pool.
        config: Its settings.
        poster: Sends webhooks.
    """
    options = arq_options(url, config, QUEUE)
    client, turns = options["redis_pool"], Turns()
    deliverer = Deliverer(client, config.webhooks, poster, turns)
    worker = TurnsWorker(
        functions=[arq.func(deliver, name=TASK)],
        queue_name=QUEUE,
        ctx={DELIVERER: deliverer},
        handle_signals=False,
        keep_result=0,
        max_tries=1_000_000,  # attempts are counted in the delivery's record
        max_jobs=MOST_AT_ONCE,
        job_timeout=config.webhooks.timeout_s + MARGIN_S,
        poll_delay=POLL_S,
        log_results=False,
        **options,
    )
    worker.turns, worker.hosts = turns, Hosts(client)
    return worker


async def run_webhooks(url: str, config: Config) -> None:
    """Delivers webhooks until cancelled.

    Args:
        url: Redis of the pool.
        config: Its settings.
    """
    await keep_running("webhooks", url, config, partial(_run, url, config))


async def _run(url: str, config: Config) -> None:
    """Takes announcements, sweeps and delivers, until one of these fails."""
    settings = config.webhooks
    poster = Poster(timeout_s=settings.timeout_s, allow_private=settings.allow_private)
    async with poster:
        worker = make_worker(url, config, poster)
        tasks = (
            asyncio.create_task(_take(worker.pool), name="webhooks-announced"),
            asyncio.create_task(_sweep(worker.pool), name="webhooks-sweep"),
            asyncio.create_task(run_worker(worker), name="arq-webhooks"),
        )
        await until_first_ends(*tasks)


async def _take(client: "redis.asyncio.Redis") -> None:
    hooks = Webhooks(client)
    while True:
        await hooks.take_announced(BLOCK_MS)


async def _sweep(client: "redis.asyncio.Redis") -> None:
    """No task of arq: it would wait behind the very deliveries that it looks after."""
    hooks = Webhooks(client)
    while True:
        try:
            found = await hooks.sweep()
        except REDIS_ERRORS:
            raise
        except Exception:  # noqa: BLE001 - deliveries go on without it
            _log.exception("webhooks_not_swept")
        else:
            if found:
                _log.info("webhooks_found_late", webhooks=found)
        await asyncio.sleep(SWEEP_S)
