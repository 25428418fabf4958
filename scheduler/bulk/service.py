"""arq's part of bulk runs, and the loop that tells it which runs have something to do.

arq's sharp edges, and how they are met: a task in progress hides others only beyond the
read limit, which is far above the number of tasks at once; only `Retry` runs a task
again, so every pass ends with it while there is more to do; a task whose process was
killed is held back until its mark expires, so that mark lives for seconds and is
renewed while the task runs; nothing that must not be lost depends on arq: what is to do
stands in the run, and the sweep finds it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import arq
import redis.asyncio
import structlog
from arq.constants import in_progress_key_prefix
from arq.cron import CronJob
from arq.worker import Function, Retry

from ...shared.bulk.keys import ALIVE, BELL, DIRTY, QUEUE, RUN_ID
from ...shared.keys import Keys
from ...shared.script_runner import text
from ..arq_running import QuietWorker, wake
from ..events import PAUSE_S, DoneReader, Handler
from ..outage import REDIS_ERRORS
from .advance import advance
from .events import on_done
from .pool import BulkPool
from .sweeping import sweep

POOL_FIELD: Final = "bulk"
"""Of arq's context: the `BulkPool`."""
MAX_JOBS: Final = 8
"""Runs advanced at once by one process."""
POLL_S: Final = 0.2
READ_LIMIT: Final = 1000
"""Tasks that arq looks at in one poll."""
IN_PROGRESS_S: Final = 5.0
"""A task whose process was killed is taken up again after this long."""
RENEW_S: Final = 1.5
TASK_S: Final = 600
"""Longest run of one task: the division of a document of many megabytes."""
OUTAGE_S: Final = 1.0
BROKEN_S: Final = 10.0
"""After so long a run is tried again that Redis, or a fault of ours, broke off."""
ALIVE_MS: Final = 30_000
ALIVE_EVERY_S: Final = 5.0
"""How often that is said."""
MOST_DIRTY: Final = 100
"""Runs told to arq in one round."""
TRIES: Final = 2**31
"""Passes over a run have no limit; each is a try for arq."""
SWEEP_SECONDS: Final = {0, 10, 20, 30, 40, 50}
_log = structlog.get_logger(__name__)


def task_id(run: str) -> str:
    """Returns arq's job id of a run: fixed, so that it is queued once."""
    return f"bulk:{run}"


async def advance_run(context: dict[str, Any], run: str) -> None:
    """Arq task: a pass over a run, and another one while there is more to do."""
    pool = cast("BulkPool", context[POOL_FIELD])
    if run in pool.busy:
        return  # its mark expired while this very process was still at it
    pool.busy.add(run)
    try:
        async with _in_progress(pool.client, str(context["job_id"])):
            pause_s = await _pass(pool, run)
    finally:
        pool.busy.discard(run)
    if pause_s is not None:
        raise Retry(defer=pause_s or None)


async def _pass(pool: BulkPool, run: str) -> float | None:
    """One pass; an error ends it alone, and it is made again after a while."""
    try:
        return await advance(pool, run)
    except REDIS_ERRORS as error:
        _log.warning("bulk_run_interrupted", run=run, error=str(error))
        return OUTAGE_S
    except Exception:  # noqa: BLE001 - any other error would end the task for good
        _log.exception("bulk_run_not_advanced", run=run)
        return BROKEN_S


@asynccontextmanager
async def _in_progress(
    client: "redis.asyncio.Redis", job_id: str
) -> AsyncIterator[None]:
    """Renews a task's mark; on leaving none is on its way that arq does not remove."""
    ended = asyncio.get_running_loop().create_future()
    renewing = asyncio.create_task(_renew(client, job_id, ended))
    try:
        yield
    finally:
        ended.set_result(None)
        await renewing


async def _renew(
    client: "redis.asyncio.Redis", job_id: str, ended: "asyncio.Future[None]"
) -> None:
    key = f"{in_progress_key_prefix}{job_id}"
    while not (await asyncio.wait([ended], timeout=RENEW_S))[0]:
        try:
            # Set anew: one that has expired while this process was held up comes back.
            await client.set(key, "1", px=round(IN_PROGRESS_S * 1000))
        except REDIS_ERRORS as error:
            # The task meets the outage itself.
            _log.debug("bulk_mark_not_renewed", task=job_id, error=str(error))


async def sweep_runs(context: dict[str, Any]) -> None:
    """Arq task: see `sweep`."""
    pool = cast("BulkPool", context[POOL_FIELD])
    # A large pool takes longer than the mark lives.
    async with _in_progress(pool.client, str(context["job_id"])):
        num_open = await sweep(pool)
    _log.debug("bulk_swept", open_runs=num_open)


def functions() -> Sequence[Function]:
    """Returns the tasks that are enqueued."""
    return (arq.func(advance_run, name="advance_run", max_tries=TRIES),)


def crons() -> Sequence[CronJob]:
    """Returns the tasks on a timetable."""
    return (
        arq.cron(
            sweep_runs, second=SWEEP_SECONDS, run_at_startup=True, max_tries=TRIES
        ),
    )


def make_worker(
    pool: BulkPool, connect: Callable[[str], dict[str, Any]]
) -> QuietWorker:
    """Returns the arq worker of bulk runs.

    Args:
        pool: The process's view of the pool.
        connect: Gives arq's connection and serializers for a queue's name.
    """
    worker = QuietWorker(
        functions=functions(),
        cron_jobs=crons(),
        queue_name=QUEUE,
        ctx={POOL_FIELD: pool},
        handle_signals=False,
        keep_result=0,
        max_jobs=MAX_JOBS,
        job_timeout=TASK_S,
        poll_delay=POLL_S,
        queue_read_limit=READ_LIMIT,
        log_results=False,
        **connect(QUEUE),
    )
    worker.in_progress_timeout_s = IN_PROGRESS_S
    return worker


class Teller:
    """Reads terminal events and tells arq which runs have something to do.

    Args:
        pool: The process's view of the pool.
        arq_pool: arq's connection.
        handlers: Further handlers of terminal events.
        takes_all: See `DoneReader`.
    """

    def __init__(
        self,
        pool: BulkPool,
        arq_pool: "arq.ArqRedis",
        handlers: Sequence[Handler] = (),
        takes_all: Callable[[Keys], bool] = lambda _keys: False,
    ) -> None:
        self._pool = pool
        self._arq = arq_pool
        self._reader = DoneReader(
            pool.client, (on_done(pool), *handlers), bell=BELL, takes_all=takes_all
        )
        self._said_at = -ALIVE_EVERY_S

    async def run(self) -> None:
        """Goes on until cancelled.

        Raises:
            RedisError: Redis did not answer; to be called again.
        """
        while True:
            await self.step()
            await asyncio.sleep(PAUSE_S)

    async def step(self) -> int:
        """One round.

        Returns:
            How many events were handled.
        """
        now = time.monotonic()
        if now - self._said_at >= ALIVE_EVERY_S:
            await self._pool.client.set(ALIVE, "1", px=ALIVE_MS)
            self._said_at = now
        num_events = await self._reader.step()
        dirty = await cast(
            "object",
            self._pool.client.srandmember(DIRTY, MOST_DIRTY),  # type: ignore[misc]
        )
        for name in map(text, cast("list[bytes]", dirty)):
            if not RUN_ID.fullmatch(name):
                await cast("object", self._pool.client.srem(DIRTY, name))  # type: ignore[misc]
                continue
            await self._arq.enqueue_job(
                "advance_run", name, _job_id=task_id(name), _queue_name=QUEUE
            )
            wake(QUEUE)
        return num_events
