"""arq's workers: their connection, their end, and starting them again."""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import structlog
from arq.connections import ArqRedis
from arq.worker import Worker

from ..shared.config import Config
from ..shared.outage import FIRST_WAIT_S, Backoff
from ..shared.redis import connect
from ..shared.tasks import end_tasks
from .outage import REDIS_ERRORS, Outage

IDLE_S: Final = 5.0
"""How long an idle worker sleeps at most."""
GATHER_S: Final = 0.01
"""What is queued within this time of a wake is taken together."""
SETTLE_S: Final = 2.0
"""What has run for this long has started, and what it lost is back."""
_quiet: "set[QuietWorker]" = set()
"""Those that run in this process."""
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


class QuietWorker(Worker):  # type: ignore[misc]  # arq is not typed
    """An arq worker that waits for work instead of asking for it all the time.

    arq asks Redis every `poll_delay` seconds. This one does so while tasks run or are
    due; else it sleeps until the next is due by the queue or the timetable, until
    `wake` says that something was queued here, or for `IDLE_S`, after which it finds
    what another process queued and did not live to do.
    """

    async def main(self) -> None:
        """Runs what is queued, until cancelled."""
        self.ctx["redis"] = self.pool
        self._woken = asyncio.Event()
        _quiet.add(self)
        try:
            while True:
                await self._poll_iteration()
                with contextlib.suppress(TimeoutError):  # then it is time
                    async with asyncio.timeout(await self._pause_s()):
                        await self._woken.wait()
                    await asyncio.sleep(GATHER_S)
                self._woken.clear()
        finally:
            _quiet.discard(self)

    def wake(self) -> None:
        """Says that something was queued."""
        self._woken.set()

    async def _pause_s(self) -> float:
        """Seconds until there is something to ask for."""
        poll_s = float(self.poll_delay_s)
        if self.tasks:
            return poll_s
        first = await self.pool.zrange(self.queue_name, 0, 0, withscores=True)
        due = [score / 1000 for _, score in first]
        due += [job.next_run.timestamp() for job in self.cron_jobs if job.next_run]
        left_s = float(min(due, default=math.inf)) - time.time()
        return min(max(left_s, poll_s), IDLE_S)


def wake(queue: str) -> None:
    """Wakes the workers of this process that serve a queue: something was put there."""
    for worker in _quiet:
        if worker.queue_name == queue:
            worker.wake()


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
    await end_tasks(*tasks)
    try:
        await worker.pool.delete(worker.health_check_key)
    except REDIS_ERRORS as error:
        _log.debug("health_key_left", error=str(error))
    await worker.pool.aclose(close_connection_pool=True)


async def keep_running(
    name: str, url: str, config: Config, start: Callable[[], Awaitable[None]]
) -> None:
    """Runs something, and starts it again with backoff when it ends, until cancelled.

    An outage is over once it has run for a while and Redis answers: one that Redis
    goes on refusing something meets a growing backoff, and is logged once.

    Args:
        name: For the log.
        url: Redis of the pool.
        config: Its settings.
        start: Runs it until it fails.
    """
    outage, broken = Outage(name), Backoff(floor_s=FIRST_WAIT_S)

    async def settle() -> None:
        is_back = False
        while not is_back:
            await asyncio.sleep(SETTLE_S)
            is_back = await _answers(url, config)
        outage.over()
        broken.reset()

    while True:
        settling = asyncio.create_task(settle(), name=f"{name}-settles")
        failure: Exception | None = None
        try:
            await start()
        except REDIS_ERRORS as error:
            failure = error
        except Exception:  # noqa: BLE001 - arq may raise what it likes
            _log.exception(f"{name}_failed")
        finally:
            await end_tasks(settling)
        if failure is None:
            await broken.wait()
        else:
            await outage.wait(failure)


async def _answers(url: str, config: Config) -> bool:
    client = connect(url, socket_timeout_s=config.redis.socket_timeout_s)
    try:
        return bool(await client.ping())
    except REDIS_ERRORS as error:
        _log.debug("redis_still_away", error=str(error))
        return False
    finally:
        await client.aclose()
