"""The bulk part of the janitor process: arq's worker and the teller, kept running."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from ...shared.config import Config
from ...shared.keys import Keys
from ...shared.redis import connect
from ...shared.tasks import until_first_ends
from ..arq_running import arq_options, keep_running, run_worker
from ..events import Handler
from .pool import BulkPool
from .service import Teller, make_worker


async def supervise_bulk(
    url: str,
    config: Config,
    handlers: Sequence[Handler] = (),
    takes_all: Callable[[Keys], bool] = lambda _keys: False,
) -> None:
    """Advances bulk runs until cancelled.

    Args:
        url: Redis of the pool.
        config: Its settings.
        handlers: Further handlers of terminal events.
        takes_all: See `DoneReader`.
    """
    client = connect(url, socket_timeout_s=config.redis.socket_timeout_s)
    pool = BulkPool(client, config)
    try:
        await keep_running(
            "bulk", url, config, partial(_run, url, config, pool, handlers, takes_all)
        )
    finally:
        pool.close()
        await client.aclose()


async def _run(
    url: str,
    config: Config,
    pool: BulkPool,
    handlers: Sequence[Handler],
    takes_all: Callable[[Keys], bool],
) -> None:
    worker = make_worker(pool, partial(arq_options, url, config))
    tasks = (
        asyncio.create_task(run_worker(worker), name="arq-bulk"),
        asyncio.create_task(
            Teller(pool, worker.pool, handlers, takes_all).run(), name="teller"
        ),
    )
    await until_first_ends(*tasks)
