"""The worker as a process: load and connect side by side, serve, drain, exit."""

import asyncio
import contextvars
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

import msgspec
import redis.asyncio
import structlog

from ..shared.collector import settle
from ..shared.config import Config, ModelConfig
from ..shared.errors import RedisUnavailable
from ..shared.keys import Keys
from ..shared.metrics.serving import preload, shown
from ..shared.outage import Backoff
from ..shared.redis import connect, translate
from ..shared.server_check import require_usable
from ..shared.tasks import end_tasks
from .bridge import Worker
from .herald import Herald
from .load_limit import ending_after, loaded_within
from .loading import Loaded, OnTokenizer, load
from .mps_watch import guarding, joined
from .own_version import OwnVersion
from .rank_watch import ending_with
from .registration import WorkerSpec
from .shown import EngineGauges

GROUP_VARIABLE: Final = "TOKENMILL_PROC_GROUP"
"""Set by a supervisor, which can then forfeit the leases of a worker that died."""
_CONNECT_TRIES: Final = 5
"""Some seconds, with the client's own retries: a server may be just starting."""


class WorkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker process is to do."""

    url: str
    model: ModelConfig
    engine: str = "model"
    partition: int = 0
    profile: Path | None = None
    """Where steps and kernels are timed to."""


async def serve(
    options: WorkOptions,
    config: Config,
    ready: Callable[[Loaded, str], None],
    progress: Callable[[str, float], None],
) -> int:
    """Runs one worker until a signal ends it.

    Args:
        options: What to serve, and where.
        config: Settings in force.
        ready: Called with the loaded engine and the group once jobs may come.
        progress: Called, from another thread, with a stage of loading and its
            fraction done.

    Returns:
        The process's exit code.

    Raises:
        ModelLoadError: The model cannot be loaded.
        MpsUnavailable: The settings want MPS, and its daemon does not come.
        RedisUnavailable: No connection.
        RedisUnsuitable: The server cannot be used.
    """
    group = os.environ.get(GROUP_VARIABLE) or f"w-{secrets.token_hex(8)}"
    structlog.contextvars.bind_contextvars(group=group)
    signals = _Signals()
    keys = Keys(options.model.name, options.partition)
    client = _client(options, config)
    herald = Herald(client, keys)
    try:
        mps = await joined(config.mps)
        loading = _in_thread(options, config, progress, herald.announce)
        partitions = config.pool.partitions
        version = OwnVersion(client, keys, options.model, partitions, group)
        loaded = await _examined(client, version, loading, config.worker.load_timeout_s)
        worker = _worker(client, group, options, loaded, config)
        async with ending_with(loaded.group, worker), guarding(mps, worker):
            await preload(config)
            settle()
            signals.drains(worker)  # before jobs may come: a signal must hand them back
            await version.ready()
            with translate():
                await worker.announce()
            _say_ready(loaded)
            ready(loaded, group)
            return await _run(client, config, worker, group, loaded, version)
    finally:
        herald.close()
        await client.aclose()


async def _run(
    client: "redis.asyncio.Redis",
    config: Config,
    worker: Worker,
    group: str,
    loaded: Loaded,
    version: OwnVersion,
) -> int:
    """Serves, with its metrics shown and its version watched; returns the exit code."""
    gauges = EngineGauges(loaded.card.model, lambda: worker.capacity, loaded.adapters)
    async with (
        shown(client, config, "worker", name=group, refresh=[gauges]),
        version.watched(worker),
    ):
        return await worker.run()


def _client(options: WorkOptions, config: Config) -> "redis.asyncio.Redis":
    return connect(
        options.url,
        socket_timeout_s=config.redis.socket_timeout_s,
        max_connections=config.redis.max_connections,
    )


async def _examined(
    client: "redis.asyncio.Redis",
    version: OwnVersion,
    loading: Coroutine[object, object, Loaded],
    limit_s: float,
) -> Loaded:
    """Loads while Redis is reached, then makes the checks of the version."""
    task = asyncio.create_task(loaded_within(loading, limit_s))
    try:
        await _reach(client)
        await version.begin()
    except BaseException:
        await end_tasks(task)  # what it may have failed of meanwhile comes second
        raise
    with ending_after(limit_s):
        loaded = await version.loaded(task)
    try:
        with ending_after(limit_s):
            await version.examine(loaded)
    except BaseException:
        if loaded.group is not None:
            loaded.group.close()
        raise
    return loaded


def _worker(
    client: "redis.asyncio.Redis",
    group: str,
    options: WorkOptions,
    loaded: Loaded,
    config: Config,
) -> Worker:
    return Worker(
        client=client,
        keys=Keys(options.model.name, options.partition),
        engine=loaded.engine,
        spec=WorkerSpec(
            group=group,
            card=loaded.card,
            bundle=loaded.bundle,
            block_size=loaded.block_size,
            batch_tokens=loaded.batch_tokens,
            version=options.model.version,
            serves=config.worker.serves,
            kv_overcommit=config.worker.kv_overcommit,
            tp=loaded.tp,
        ),
        config=config,
        adapters=loaded.adapters,
    )


def _say_ready(loaded: Loaded) -> None:
    structlog.get_logger().info(
        "worker_ready",
        model=loaded.card.model,
        load_s=round(loaded.load_s, 2),
        weights_version=loaded.card.weights_version,
        device=loaded.device,
        kernels=loaded.kernels,
        tp=loaded.tp,
        max_context=loaded.card.max_context,
    )


async def _in_thread(
    options: WorkOptions,
    config: Config,
    progress: Callable[[str, float], None],
    on_tokenizer: OnTokenizer,
) -> Loaded:
    """Loads in a daemon thread, which does not hold up an exit as a pool's would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Loaded] = loop.create_future()

    def settle(loaded: Loaded | None, error: BaseException | None) -> None:
        if future.done():
            return
        if loaded is not None:
            future.set_result(loaded)
        elif error is not None:
            future.set_exception(error)

    def work() -> None:
        try:
            loaded = load(
                options.engine,
                options.model,
                config.worker,
                progress,
                on_tokenizer,
                options.profile,
                config.log,
            )
        except BaseException as error:  # noqa: BLE001 - raised again on the loop
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, loaded, None)

    # Log lines of the thread carry the same names as ours.
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(work,), name="load", daemon=True).start()
    return await future


async def _reach(client: "redis.asyncio.Redis") -> None:
    """Waits for Redis for a while; the last error is raised."""
    backoff = Backoff()
    for _ in range(_CONNECT_TRIES - 1):
        try:
            await require_usable(client, serving=True)
        except RedisUnavailable:
            await backoff.wait()
        else:
            return
    await require_usable(client, serving=True)


class _Signals:
    """First SIGTERM or SIGINT drains, the second ends the process and its leases at
    once, a third does not even wait for Redis.
    """

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._seen = False
        self._ending: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def drains(self, worker: Worker) -> None:
        self._worker = worker

    def _on_signal(self, number: int) -> None:
        if self._worker is None:
            self._exit(0, number)  # nothing to drain yet
        elif not self._seen:
            self._seen = True
            self._worker.drain()
        elif self._ending is None:
            self._ending = asyncio.create_task(self._end(self._worker, number))
        else:
            self._exit(128 + number, number)

    async def _end(self, worker: Worker, number: int) -> None:
        await worker.give_up("the worker was told to end at once", counts=False)
        self._exit(128 + number, number)

    def _exit(self, code: int, number: int) -> None:
        structlog.get_logger().warning("ending_now", signal=number)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
