"""One worker: Redis on the event loop, the engine in its thread, and what joins them.

work stream → Intake → EngineThread → Publisher → token logs, results
              Registration renews leases, Control hears cancels
"""

import asyncio
import faulthandler
import os
import sys
import time
from typing import Final

import redis.asyncio
import structlog

from ..shared.clock import RedisClock
from ..shared.config import Config
from ..shared.errors import TokenmillError
from ..shared.keys import Keys
from ..shared.losses import step_stuck
from ..shared.model_terms import buckets_for
from ..shared.outage import REDIS_ERRORS, Outage
from ..shared.scripts import Scripts
from .adapters import Adapters
from .adapters_loader import AdapterLoader, NoAdapters
from .control import Control
from .ending import Ending, Way
from .engine.request import Capacity
from .engine_thread import EngineLike, EngineThread
from .finish import Recorder
from .intake import Intake
from .jobs import JobTable
from .publish import Publisher
from .registration import Registration, WorkerSpec, drained
from .routing import Router
from .tasks import first_of, started
from .token_rate import TokenRate

EXIT_STUCK: Final = 75
"""EX_TEMPFAIL: a step did not end or the engine broke; the supervisor restarts."""
_LEAVE_TIMEOUT_S: Final = 5.0
"""Handing back and leaving may take this long; leases end by themselves after."""
_LAST_WORDS_S: Final = 1.0
"""A process that must end waits no longer for its leases to be ended."""


class Worker:
    """One incarnation of a worker.

    Args:
        client: Redis.
        keys: Names of the shard it serves.
        engine: Loaded and idle; the worker runs it in a thread of its own.
        spec: What it announces.
        config: Settings in force.
        adapters: Holds the engine's adapters; None: it serves none.
    """

    def __init__(
        self,
        *,
        client: "redis.asyncio.Redis",
        keys: Keys,
        engine: EngineLike,
        spec: WorkerSpec,
        config: Config,
        adapters: AdapterLoader | None = None,
    ) -> None:
        self._client = client
        self._config = config
        self._spec = spec
        self._log = structlog.get_logger()
        self._scripts = Scripts(client, keys)
        self._table = JobTable()
        self._outage = Outage()
        self._clock = RedisClock()
        self._draining = asyncio.Event()
        self._router = Router(self._table, self._clock, on_broken=self._draining.set)
        self._thread = EngineThread(
            engine, self._router.deliver, asyncio.get_running_loop(), spec.card.model
        )
        self._publisher = self._make_publisher()
        self._adapters = self._make_adapters(adapters)
        self._intake = self._make_intake(keys)
        self._registration = self._make_registration(keys)
        self._control = Control(
            client=client,
            channel=keys.control(spec.group),
            table=self._table,
            outage=self._outage,
            on_cancelled=self._router.cancel,
            on_check=self._adapters.check,
        )
        self._router.connect(self._thread, self._publisher)
        self._owning: list[asyncio.Task[None]] = []
        """Take leases or renew them while the worker serves."""
        self._gave_up = False

    def _make_publisher(self) -> Publisher:
        config, spec = self._config, self._spec
        recorder = Recorder(
            scripts=self._scripts,
            group=spec.group,
            model=spec.card.model,
            weights_version=spec.card.weights_version,
            version=spec.version,
            table=self._table,
            clock=self._clock,
            buckets=buckets_for(config, spec.card.model),
            limits=config.scheduler,
            dead_ms=round(config.retention.dead_s * 1000),
        )
        return Publisher(
            scripts=self._scripts,
            group=spec.group,
            table=self._table,
            recorder=recorder,
            clock=self._clock,
            outage=self._outage,
            emit_s=config.worker.emit_ms / 1000.0,
            on_lost=self._router.lose,
            on_cancelled=self._router.cancel,
            on_sent=self._router.hold_or_go_on,
            rate=TokenRate(spec.card.model),
        )

    def _make_intake(self, keys: Keys) -> Intake:
        config, spec = self._config, self._spec
        return Intake(
            client=self._client,
            scripts=self._scripts,
            stream=keys.work(spec.group),
            group=spec.group,
            lease_ms=config.worker.lease_ms,
            weights_version=spec.card.weights_version,
            table=self._table,
            outage=self._outage,
            take=self._router.take,
            end=self._publisher.end,
            lost=self._router.forget,
            bring=self._adapters.bring,
        )

    def _make_adapters(self, loader: AdapterLoader | None) -> Adapters:
        return Adapters(
            client=self._client,
            loader=loader or NoAdapters("its engine has none"),
            card=self._spec.card,
            table=self._table,
            outage=self._outage,
            limit_s=self._config.worker.step_timeout_s,
            watch=self._router.watch,
            take=self._router.take,
            end=self._publisher.end,
        )

    def _make_registration(self, keys: Keys) -> Registration:
        return Registration(
            client=self._client,
            scripts=self._scripts,
            keys=keys,
            spec=self._spec,
            lease_ms=self._config.worker.lease_ms,
            table=self._table,
            capacity=lambda: self._thread.capacity,
            adapters=self._adapters.stats,
            output=self._publisher.rate,
            clock=self._clock,
            outage=self._outage,
            on_lost=self._router.lose,
            on_cancelled=self._router.cancel,
        )

    # --- life ----------------------------------------------------------------
    def drain(self) -> None:
        """Takes nothing new; `run` returns when all is done or handed back."""
        self._draining.set()

    @property
    def is_idle(self) -> bool:
        """Whether it holds no job."""
        return self._table.empty.is_set()

    @property
    def capacity(self) -> Capacity:
        """The engine's room and counters, a moment old."""
        return self._thread.capacity

    async def announce(self) -> None:
        """Registers with the pool; from now on jobs may come."""
        await self._registration.announce()

    async def run(self) -> int:
        """Serves until `drain` is called or the engine breaks.

        Returns:
            The process's exit code: 0 after a drain, `EXIT_STUCK` when broken.
        """
        self._thread.start()
        intake = started(self._intake.run(), "intake")
        heartbeat = started(self._registration.run(), "heartbeat")
        self._owning = [intake, heartbeat]
        others = [
            heartbeat,
            started(self._publisher.run(), "publish"),
            started(self._control.run(), "control"),
            started(self._watch(), "watch"),
        ]
        draining = started(self._draining.wait(), "draining")
        try:
            await first_of(draining, intake, *others)
            if self._gave_up:
                await asyncio.Event().wait()  # whoever gave up ends the process
            intake.cancel()
            await asyncio.wait([intake])
            await self._drain()
            await self._leave()
            facts = drained(self._thread.capacity, self._adapters.stats())
            self._log.info("drained", **facts)
        finally:
            for task in (draining, intake, *others):
                task.cancel()
            faulthandler.cancel_dump_traceback_later()
            await self._adapters.close()
            self._thread.stop(timeout_s=1.0)
        return EXIT_STUCK if self._router.broken else 0

    async def _drain(self) -> None:
        """Lets running jobs go on for a while; a broken engine has none."""
        drain_s = self._config.worker.drain_s
        self._log.info("draining", jobs=len(self._table), at_most_s=drain_s)
        self._registration.drain()
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await self._registration.beat()
                await self._intake.hand_back()
        except REDIS_ERRORS as error:
            self._outage.failed("drain", error)
        try:
            async with asyncio.timeout(drain_s):
                await self._table.empty.wait()
        except TimeoutError:
            self._log.warning("drain_time_over", jobs=len(self._table))

    async def _leave(self) -> None:
        """Hands back what is left and takes the group out of the pool."""
        left = [job for job in self._table if not job.closing]
        self._thread.cancel([job.engine_id for job in left])
        for job in left:
            self._publisher.end(Ending(job, Way.RELEASE))
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await self._publisher.settled()
                await self._intake.hand_back()
                await self._scripts.leave(self._spec.group)
        except REDIS_ERRORS as error:
            self._log.warning("left_without_goodbye", error=str(error) or repr(error))

    async def _watch(self) -> None:
        """Ends the process when a step, or this very loop, does not come back."""
        limit_s = self._config.worker.step_timeout_s
        every_s = min(1.0, limit_s / 4)
        armed_until = 0.0
        while True:
            if time.monotonic() > armed_until:
                # If this loop itself hangs, the C-level timer ends the process. Setting
                # it waits for a thread to end, so it is done seldom.
                armed_until = time.monotonic() + limit_s / 4
                faulthandler.dump_traceback_later(1.5 * limit_s, exit=True)
            age_s = self._thread.step_age_s()
            if age_s > limit_s:
                self._log.error(
                    "step_stuck", for_s=round(age_s, 1), jobs=len(self._table)
                )
                await self.give_up(step_stuck(limit_s), counts=True)
                sys.stderr.flush()
                os._exit(EXIT_STUCK)
            await asyncio.sleep(every_s)

    async def give_up(self, reason: str, *, counts: bool) -> None:
        """Ends the leases of what runs here; the process is to end at once after.

        Args:
            reason: Why, for whoever runs the jobs next.
            counts: Whether that speaks against the jobs.
        """
        self._gave_up = True
        self._registration.fall_silent()
        for task in self._owning:
            task.cancel()
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await asyncio.gather(*self._owning, return_exceptions=True)
                await self._registration.wait_silent()
                await self._scripts.forfeit(self._spec.group, reason, counts=counts)
        except (*REDIS_ERRORS, TokenmillError) as error:
            # Then they end by themselves, and nobody learns why.
            self._log.warning("reason_not_recorded", error=str(error) or repr(error))
