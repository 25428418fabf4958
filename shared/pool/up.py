"""`tokenmill up`: Redis, scheduler, janitor and workers as one supervised pool."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Final

import redis.asyncio

from ..config import Config
from ..connection import FILE_NAME, ConnectionFile, state_dir, write_connection
from ..errors import RedisUnavailable, RedisUnsuitable
from ..metrics.targets import FILE_NAME as TARGETS
from ..metrics.targets import keep_targets
from ..redis import connect, redact_url
from ..server_check import check_server
from ..tasks import end_tasks
from .embedded import EmbeddedRedis
from .lines import line, passed_on, process_line
from .lock import StateLock
from .output import Output
from .plan import GATEWAY, PoolOptions, check_plan, plan_children
from .processes import Child, ChildState, Supervisor
from .published import publish_card
from .reserved_port import settled_port
from .telling import tell_ready, tell_served, tell_state
from .version_crew import VersionCrew
from .watching import Watcher, forget_dead_groups, is_worker

_FORFEIT_WAIT_S: Final = 2.0
"""How long killed children may take to be gone and their leases ended."""
EXIT_FAILED: Final = 1
"""A child failed for good without an exit code of its own."""
VERSIONS: Final = "versions"
"""The task that starts workers of versions: it ends before the workers do."""


class Pool:
    """A running pool.

    Args:
        options: What was asked for.
        config: Settings in force.
        url: Redis to use; None starts one.
        ready_file: Written when the pool is ready.
    """

    def __init__(
        self,
        options: PoolOptions,
        config: Config,
        url: str | None,
        ready_file: Path | None = None,
    ) -> None:
        self._options = options
        self._config = config
        self._url = url
        self._ready_file = ready_file
        self._directory = state_dir(config)
        self._lock = StateLock(self._directory)
        self._embedded: EmbeddedRedis | None = None
        self._supervisor = Supervisor([])
        self._console = sys.stderr.isatty()
        self._output = Output(
            self._directory / "logs", passed_on, logs_too=self._console
        )
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._failed: Child | None = None
        self._watcher: Watcher | None = None
        self._stopping = False

    async def run(self) -> int:
        """Runs the pool until a signal ends it or it cannot go on.

        Returns:
            0 after a signal, else the exit code of the child that failed for good.

        Raises:
            ConfigError: Its workers cannot be placed on this host.
        """
        check_plan(self._options, self._config)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        self._lock.acquire()
        try:
            client = await self._open_redis()
            try:
                with settled_port(self._options, self._config) as self._options:
                    return await self._serve(client)
            finally:
                await client.aclose()
        finally:
            await self._close_redis()
            (self._directory / FILE_NAME).unlink(missing_ok=True)
            self._lock.release()

    # --- Redis ---------------------------------------------------------------------
    async def _open_redis(self) -> redis.asyncio.Redis:
        if self._url is None:
            self._embedded = EmbeddedRedis(self._directory)
            await self._embedded.start()
            origin = self._embedded.binary.origin
            process_line(
                "redis", self._embedded.pid, f"{self._embedded.address} (from {origin})"
            )
        url = self._embedded.url if self._embedded else self._url
        assert url is not None
        client = connect(url, socket_timeout_s=self._config.redis.socket_timeout_s)
        findings = await check_server(client)
        errors = [one for one in findings if one.severity == "error"]
        if errors:
            await client.aclose()
            raise RedisUnsuitable(f"{errors[0].message}; {errors[0].cure}")
        if self._embedded is None:
            process_line("redis", None, f"{redact_url(url)} (given)")
            for one in findings:
                if one.severity == "warning":
                    line(f"warning: {one.message}; cure: {one.cure}")
        if self._embedded is not None and (left := await forget_dead_groups(client)):
            line(f"{left} jobs that an earlier pool was running are redelivered")
        await publish_card(client, self._config)
        write_connection(
            self._directory,
            ConnectionFile(
                url=url,
                pid=os.getpid(),
                redis_pid=self._embedded.pid if self._embedded else None,
            ),
        )
        self._url = url
        return client

    async def _close_redis(self) -> None:
        if self._embedded is not None:
            await self._embedded.stop()
            self._embedded.release()

    async def _keep_redis(self) -> None:
        """Starts the embedded server again when it dies."""
        assert self._embedded is not None
        wait_s = 0.2
        while True:
            code = await self._embedded.wait()
            if self._stopping:
                return
            line(f"redis died (exit {code}); starting it again")
            await asyncio.sleep(wait_s)
            wait_s = min(10.0, wait_s * 2)
            try:
                await self._embedded.start()
            except RedisUnavailable as error:
                line(f"error: {error}")
            else:
                process_line(
                    "redis", self._embedded.pid, f"{self._embedded.address} again"
                )

    # --- children ------------------------------------------------------------------
    async def _serve(self, client: redis.asyncio.Redis) -> int:
        assert self._url is not None
        specs = plan_children(
            self._options, self._config, self._url, console=self._console
        )
        crew = VersionCrew(
            client,
            self._options,
            self._config,
            self._url,
            self._output,
            self._on_change,
            console=self._console,
        )
        self._supervisor = crew.supervisor
        self._watcher = Watcher(
            client,
            self._supervisor.children,
            self._announce_ready,
            self._announce_served,
        )
        await crew.begin(specs)
        where = self._directory / FILE_NAME
        line(f"connect: {redact_url(self._url)}; clients here find it through {where}")
        if not self._console:
            line(f"logs: {self._directory / 'logs'}")
        tasks = [asyncio.create_task(self._watcher.run(), name="watch")]
        if self._options.with_workers:
            tasks.append(asyncio.create_task(crew.run(), name=VERSIONS))
        if self._config.metrics.enabled:
            kept = keep_targets(client, self._directory / TARGETS)
            tasks.append(asyncio.create_task(kept, name="targets"))
        if self._embedded is not None:
            tasks.append(asyncio.create_task(self._keep_redis(), name="redis"))
        try:
            return await self._until_end(tasks)
        finally:
            self._stopping = True
            await end_tasks(*tasks)

    async def _until_end(self, helpers: list["asyncio.Task[None]"]) -> int:
        signalled = asyncio.create_task(self._signals.get())
        try:
            while not signalled.done() and self._failed is None:
                changed = asyncio.create_task(self._changed.wait())
                waited = [signalled, changed, *helpers]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._changed.clear()
                for helper in helpers:
                    if helper.done():
                        helper.result()  # they end by an error alone: raise it
        finally:
            signalled.cancel()
        failed = self._failed
        line("draining; a second signal ends at once")
        await end_tasks(*(one for one in helpers if one.get_name() == VERSIONS))
        await self._drain()
        if failed is None:
            return 0
        return failed.exit_code or EXIT_FAILED

    async def _drain(self) -> None:
        """The gateway first, while its streams are still served; then the workers, so
        that what they hand back is still taken; Redis last.
        """
        children = self._supervisor.children
        workers = [child.spec.name for child in children if is_worker(child)]
        others = [child.spec.name for child in children if not is_worker(child)]

        async def in_order() -> None:
            await self._supervisor.stop([GATEWAY])
            await self._supervisor.stop(workers)
            await self._supervisor.stop(others)

        draining = asyncio.create_task(in_order())
        again = asyncio.create_task(self._signals.get())
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
        if again.done() and not draining.done():
            line("ending at once")
            self._supervisor.kill()
            # Redis outlives them for a moment: leases of the killed end in it.
            await asyncio.wait([draining], timeout=_FORFEIT_WAIT_S)
            if self._embedded is not None:
                self._embedded.kill()
        again.cancel()
        await draining

    def _on_change(self, child: Child) -> None:
        tell_state(child)
        if child.state is ChildState.STARTING and self._watcher is not None:
            self._watcher.look()
        elif child.state is ChildState.FAILED:
            for text in self._output.tail(child.spec.name):
                line(f"  {text}")
            # A pool that already serves goes on with what it has.
            if child.spec.essential and not self._serves():
                self._failed = child
        self._changed.set()

    def _serves(self) -> bool:
        return self._watcher is not None and self._watcher.serves

    def _announce_served(self, model: str) -> None:
        assert self._watcher is not None
        tell_served(self._watcher, model)

    def _announce_ready(self) -> None:
        assert self._watcher is not None
        tell_ready(self._watcher)
        if self._ready_file is not None:
            self._ready_file.write_text("ready\n", encoding="utf-8")
