"""A worker and its version: checked before it serves, ended when the version drains."""

import asyncio
import os
import platform
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from ..shared.errors import ConfigError, HealthFailed, TokenmillError
from ..shared.health_set import HealthReport, HealthSet
from ..shared.outage import REDIS_ERRORS
from ..shared.redis import translate
from ..shared.tasks import end_tasks
from ..shared.version_life import VersionLife
from ..shared.versions import VersionSpec
from .version_failure import VersionFailure

if TYPE_CHECKING:
    import redis.asyncio

    from ..shared.config import ModelConfig
    from ..shared.keys import Keys
    from .loading import Loaded

SUPERVISED_VARIABLE: Final = "TOKENMILL_PROC_SUPERVISED"
"""Set by `tokenmill up`: it decides which versions run, and counts their failures."""
LOOK_EVERY_S: Final = 1.0
"""Between two looks at what is to become of the version."""
IDLE_LOOKS: Final = 3
"""A version that drains has been without jobs for so many looks before it ends."""
IDLE_LOOK_S: Final = 0.5
"""Between two of those."""
_NOT_TO_RUN: Final = ("added", "failed", "stopped")


class Draining(Protocol):
    """What is asked of a worker whose version may drain."""

    @property
    def is_idle(self) -> bool:
        """Whether it holds no job."""
        ...

    def drain(self) -> None:
        """Takes nothing more and ends."""
        ...


class OwnVersion:
    """What one worker does about the version that it serves.

    Args:
        client: Redis.
        keys: Names of its shard.
        model: What it loads.
        partitions: How many the pool has.
        group: This incarnation.
        supervised: Whether `tokenmill up` has started it; None looks at the
            environment.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        keys: "Keys",
        model: "ModelConfig",
        partitions: int,
        group: str,
        *,
        supervised: bool | None = None,
    ) -> None:
        if supervised is None:
            supervised = SUPERVISED_VARIABLE in os.environ
        self._client = client
        self._keys = keys
        self._model = model
        self._version = model.version
        self._group = group
        self._supervised = supervised
        self._life = VersionLife(client, model.name, partitions)
        self._versions = self._life.versions
        self._failure = VersionFailure(
            client, self._life, model.name, model.version, partitions
        )
        self._health: HealthSet | None = None
        self._report: HealthReport | None = None
        self._weights = ""
        self._restored_ms = 0
        """When Redis had last lost the versions, as far as seen."""
        self._log = structlog.get_logger().bind(version=self._version)

    async def begin(self) -> None:
        """Says that the version loads; learns what is to be checked.

        Raises:
            ConfigError: A supervisor's version that is not to run any more.
        """
        with translate():
            route, specs = await self._versions.read()
            spec = specs.get(self._version)
            if spec is not None and spec.state in _NOT_TO_RUN:
                if self._supervised:
                    problem = f"{self._version} of {self._model.name} is {spec.state}"
                    raise ConfigError("version", f"{problem}; expected it to be loaded")
                await self._life.begin_load(self._version)
            elif not route.shares:
                await self._life.keep_share(self._version)
            if spec is not None:
                self._health = spec.health
                await self._renew(spec)
                await self._tell("has begun to load it")

    async def _tell(self, what: str) -> None:
        """Says how far a version is to who waits for it, and would start another."""
        reason = f"worker {self._group} on {platform.node()}, pid {os.getpid()}, {what}"
        try:
            await self._versions.set_state(
                self._version, "loading", reason=reason, only_from=("loading",)
            )
        except (TokenmillError, *REDIS_ERRORS) as error:
            self._log.debug("progress_not_told", error=str(error))

    async def _renew(self, spec: VersionSpec) -> None:
        """What is loaded is what is recorded: settings go before an older record."""
        if spec.model != self._model and await self._versions.renew(
            self._version, self._model
        ):
            self._log.warning("version_settings_changed", model=self._model.name)

    async def examine(self, loaded: "Loaded") -> None:
        """Makes the checks of the version's health set.

        Raises:
            HealthFailed: At least one did not pass; the version is marked as failed.
        """
        self._weights = loaded.card.weights_version
        if self._health is None:
            return
        from .health_set import run_health_set

        checks = self._health
        self._log.info("health_set_begins", checks=len(checks.checks))
        await self._tell(f"has begun its health set ({len(checks.checks)} checks)")
        try:
            examined = asyncio.to_thread(run_health_set, checks, loaded, self._group)
            report = await examined
        except Exception as error:  # noqa: BLE001 - an engine may raise anything
            self._log.error("health_set_broke_off", exc_info=error)
            problem = f"{type(error).__name__}: {error}"
            report = HealthReport(
                passed=False,
                num_checks=len(checks.checks),
                num_failed=len(checks.checks),
                failures=(f"the health run broke off: {problem[:300]}",),
                group=self._group,
            )
        self._report = report
        self._log.info(
            "health_set_ended",
            passed=report.passed,
            failed=report.num_failed,
            perplexity=report.perplexity,
            took_ms=report.took_ms,
        )
        if not report.passed:
            reason = (
                f"{report.num_failed} of {report.num_checks} checks of its health set "
                f"failed, the first: {report.failures[0]}"
            )
            await self._failure.of_health(reason, report)
            raise HealthFailed(
                f"version {self._version} of {self._model.name} takes no jobs: {reason}"
            )

    async def loaded(self, loading: "Awaitable[Loaded]") -> "Loaded":
        """Waits for the model.

        Where it cannot be loaded and nobody supervises this worker, that is recorded; a
        supervisor tries again, and counts.
        """
        try:
            return await loading
        except Exception as error:
            if not self._supervised:
                await self._failure.of_load(str(error) or repr(error))
            raise

    async def ready(self) -> None:
        """Says that the version takes jobs, before this worker announces itself.

        By then it is written down who serves: no version gets a share by being there.
        """
        with translate():
            specs = await self._versions.specs()
            if spec := specs.get(self._version):
                # Others could not load it; who can is here.
                by_hand = bool(spec.failures) and not self._supervised
                await self._versions.set_state(
                    self._version,
                    "ready",
                    only_from=("loading", "ready", *(("failed",) if by_hand else ())),
                    weights_version=self._weights,
                    health_report=self._report,
                )
                if by_hand:
                    await self._failure.take_back()
            if specs:
                await self._life.claim(self._version)

    @asynccontextmanager
    async def watched(self, worker: Draining) -> AsyncIterator[None]:
        """Ends the worker once its version drains and nothing of it is left.

        Args:
            worker: It serves inside; after that it has left the pool.
        """
        watching = asyncio.create_task(self._watch(worker), name="version")
        try:
            yield
        finally:
            await end_tasks(watching)
            await self._left()

    async def _watch(self, worker: Draining) -> None:
        idle_looks = 0
        while True:
            await asyncio.sleep(IDLE_LOOK_S if idle_looks else LOOK_EVERY_S)
            try:
                with translate():
                    over = await self._is_over(worker)
            except (TokenmillError, *REDIS_ERRORS) as error:
                self._log.debug("version_not_seen", error=str(error))
                continue
            idle_looks = idle_looks + 1 if over else 0
            if idle_looks >= IDLE_LOOKS:
                self._log.info("version_drained", model=self._model.name)
                worker.drain()
                return

    async def _is_over(self, worker: Draining) -> bool:
        route, specs = await self._versions.follow()
        if route.restored_ms != self._restored_ms:
            # What was written again may say that this worker is not ready yet.
            await self.ready()
            self._restored_ms = route.restored_ms
            return False
        spec = specs.get(self._version)
        if spec is None:
            if specs or route.shares or route.retiring:
                await self._record()
            return False
        if spec.state != "draining" or not worker.is_idle:
            return False
        return not await self._life.is_needed(
            self._version, self._weights, self._keys.partition, self._group
        )

    async def _record(self) -> None:
        """Adds what serves already, once a model has versions at all."""
        spec = VersionSpec(
            version=self._version,
            model=self._model,
            state="ready",
            weights_version=self._weights,
            health=self._health,
            health_report=self._report,
        )
        try:
            await self._versions.add(spec)
        except TokenmillError as error:
            # Another worker of this version was faster.
            self._log.debug("version_not_recorded", error=str(error))

    async def _left(self) -> None:
        """Says that the version is stopped, if this was its last worker."""
        try:
            groups = await self._life.groups()
            if any(one.version == self._version for one in groups):
                return
            if self._version in await self._versions.specs():
                await self._versions.set_state(
                    self._version, "stopped", only_from=("draining",)
                )
        except (TokenmillError, *REDIS_ERRORS) as error:
            self._log.warning("end_not_recorded", error=str(error))
