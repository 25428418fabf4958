"""What a worker records when its version cannot be loaded, or does not pass."""

import platform
from typing import TYPE_CHECKING

import structlog

from ..shared.errors import TokenmillError
from ..shared.health_set import HealthReport
from ..shared.outage import REDIS_ERRORS
from ..shared.version_failing import forgiven
from ..shared.version_hosts import VersionHosts
from ..shared.version_life import VersionLife

if TYPE_CHECKING:
    import redis.asyncio

_REASON = 600
"""Characters of a reason that are recorded."""


class VersionFailure:
    """Marks a version as failed, unless others of it go on.

    Args:
        client: Redis.
        life: Of the model's versions.
        model: Public name.
        version: Of the worker.
        partitions: How many the pool has.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        life: VersionLife,
        model: str,
        version: str,
        partitions: int,
    ) -> None:
        self._host = f"{platform.node()} (started by hand)"
        self._hosts = VersionHosts(client, model, partitions, self._host)
        self._life = life
        self._model = model
        self._version = version
        self._log = structlog.get_logger().bind(version=version)

    async def of_load(self, reason: str) -> None:
        """Notes that a worker by hand cannot load it: others may, or try to."""
        try:
            spec = (await self._life.versions.specs()).get(self._version)
            if spec is None or spec.state == "draining":
                return
            others = await self._hosts.others(spec)
            if others:
                self._log.error("worker_failed_others_go_on", reason=reason)
            await self._hosts.fails(self._version, reason, is_last=not others)
        except (TokenmillError, *REDIS_ERRORS) as error:
            self._log.warning("failure_not_recorded", error=str(error))

    async def take_back(self) -> None:
        """Takes back that a worker by hand could not load it here: this one could."""
        decide = forgiven(self._model, self._version, self._host)
        await self._life.versions.change(decide)

    async def of_health(self, reason: str, report: HealthReport) -> None:
        """Marks it as failed on all hosts, unless a worker of it serves."""
        versions = self._life.versions
        try:
            specs, groups = await versions.specs(), await self._life.groups()
            if self._version not in specs:
                return
            if any(one.version == self._version for one in groups):
                self._log.error("worker_failed_others_serve", reason=reason)
                return
            await versions.set_state(
                self._version,
                "failed",
                reason=reason[:_REASON],
                only_from=("added", "loading", "ready", "failed"),
                health_report=report,
            )
        except (TokenmillError, *REDIS_ERRORS) as error:
            self._log.warning("failure_not_recorded", error=str(error))
