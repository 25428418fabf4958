"""Steps in the life of a model's versions, asked for by a client."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ...shared.config import Config
from ...shared.config_check import check
from ...shared.config_model import ModelConfig
from ...shared.errors import (
    ConfigError,
    InvalidRequest,
    ResultTimeout,
    TokenmillError,
    VersionConflict,
    VersionFailed,
)
from ...shared.health_set import HealthSet
from ...shared.keys import MODELS, Keys
from ...shared.script_runner import text
from ...shared.shadow_report import ShadowReport, forget_report, read_report
from ...shared.version_groups import waiting_job
from ...shared.version_keys import VERSIONED
from ...shared.version_life import VersionLife
from ...shared.version_restoring import restored
from ...shared.versions import Route, VersionSpec
from ..session import Session
from .draining import LOOK_EVERY_S, Draining
from .info import VersionInfo, version_infos, where_not

if TYPE_CHECKING:
    from .calls import Tell

SEEN_S: Final = 0.3
"""By then whoever follows the model has seen a switch."""
_UNSEEN_S: Final = 10.0
"""After so long without any worker there is probably none that will come."""
_log: Final = logging.getLogger("tokenmill.producer")


async def models_with_versions(session: Session) -> list[str]:
    """Returns the models that have versions, and those that were ever served."""
    versioned, known = await session.read(("SMEMBERS", VERSIONED), ("HKEYS", MODELS))
    return sorted({text(name) for name in (*versioned, *known)})


def require_model(model: str, known: Sequence[str]) -> None:
    """Refuses a model that nobody has described or served.

    Raises:
        InvalidRequest: Names those that there are.
    """
    if model not in known:
        raise InvalidRequest(
            "model",
            f"'{model[:96]}' has no versions here; known: {', '.join(known) or 'none'}",
        )


class ModelVersions:
    """The versions of one model. Each step may be repeated, so a blip is waited out.

    Args:
        session: The client's connections.
        model: Public name.
        partitions: How many the pool has.
    """

    def __init__(self, session: Session, model: str, partitions: int) -> None:
        self._session = session
        self._patiently = session.patiently
        self._client = session.redis
        self._model = model
        self._partitions = partitions
        self._life = VersionLife(self._client, model, partitions)
        self._versions = self._life.versions

    async def infos(self) -> list[VersionInfo]:
        """Returns what is known of all of them, by name."""
        return await self._patiently(self._infos)

    async def _infos(self) -> list[VersionInfo]:
        route, specs = await self._versions.read()
        groups = await self._life.groups()
        reports: dict[str, ShadowReport] = {}
        for name in specs:
            report = await read_report(self._client, self._model, name)
            if report.copied or route.shadow.get(name):
                reports[name] = report
        return version_infos(self._model, route, specs, groups, reports)

    async def info(self, version: str) -> VersionInfo:
        """Returns what is known of one."""
        found = {one.version: one for one in await self.infos()}
        if version not in found:
            self._life.known(version, await self._patiently(self._versions.specs))
        return found[version]

    async def add(self, model: ModelConfig, health: HealthSet | None) -> VersionInfo:
        """Describes a version; see `Client.add_version`."""
        _check(model)
        spec = VersionSpec(version=model.version, model=model, health=health)
        tries = 0

        async def added() -> None:
            nonlocal tries
            tries += 1
            try:
                await self._life.require_free(model.version)
                await self._versions.add(spec)
            except VersionConflict:
                # The reply to a try before may be all that was lost.
                known = (await self._versions.specs()).get(model.version)
                if tries < 2 or known is None or not _says_the_same(known, spec):
                    raise

        await self._patiently(added)
        return await self.info(model.version)

    async def load(
        self, version: str, wait_s: float | None, tell: "Tell"
    ) -> VersionInfo:
        """Has a version loaded; see `Client.load_version`."""
        spec = await self._patiently(lambda: self._life.begin_load(version))
        if spec.model.replicas == 0:
            tell(
                f"{version} has replicas = 0, so `tokenmill up` starts none; by hand: "
                f"{_by_hand(self._model, version)}"
            )
        if wait_s is None:
            return await self.info(version)
        began, said = time.monotonic(), ""
        while True:
            info = await self.info(version)
            groups = await self._patiently(self._life.groups)
            if info.state == "ready" and self._life.serves(version, groups):
                tell(f"{version} is ready: {info.groups} workers")
                return info
            if info.state in ("failed", "stopped", "draining"):
                why = info.reason or "it was told to stop meanwhile"
                raise VersionFailed(
                    f"version {version} of {self._model} is {info.state}: {why}"
                )
            waited_s = time.monotonic() - began
            now = _progress(info, waited_s, self._model)
            if now != said:
                tell(now)
                said = now
            if waited_s > wait_s:
                raise ResultTimeout(
                    f"version {version} of {self._model} is not ready after "
                    f"{wait_s:g} s ({now}); it goes on loading"
                )
            await asyncio.sleep(LOOK_EVERY_S)

    async def shadow(self, version: str, percent: float) -> ShadowReport:
        """Has traffic copied to a version; see `Client.shadow_version`."""
        await self._patiently(lambda: self._shadow(version, percent))
        return await self.report(version)

    async def _shadow(self, version: str, percent: float) -> None:
        route, _ = await self._versions.read()
        if percent > 0:
            await self._life.require_live(version)
            if route.shares.get(version, 0.0) >= 100.0 or not route.shares:
                raise VersionConflict(
                    f"version {version} of {self._model} serves the jobs itself, so "
                    "there is nothing to compare it with; copy to another version"
                )
            if not route.shadow.get(version):
                await forget_report(self._client, self._model, version)
        await self._versions.shadow(version, percent)

    async def report(self, version: str) -> ShadowReport:
        """Returns how copies compare; see `Client.shadow_report`."""
        self._life.known(version, await self._patiently(self._versions.specs))
        return await self._patiently(
            lambda: read_report(self._client, self._model, version)
        )

    async def switch(self, version: str, percent: float) -> dict[str, float]:
        """Gives new jobs to a version; see `Client.switch_version`."""

        async def switched() -> Route:
            if percent > 0:
                await self._life.require_live(version)
            return await self._versions.move(version, percent)

        return self._kept(await self._patiently(switched))

    def _kept(self, route: Route) -> dict[str, float]:
        """Redis may lose a switch before anybody has seen it, who would write it again:
        so who made it looks once more, in the background.
        """
        self._session.start(self._keep(route))
        return route.shares

    async def _keep(self, route: Route) -> None:
        await asyncio.sleep(SEEN_S)
        try:
            if (await self._versions.change(restored(route)))[1]:
                _log.warning("route of %s written again: Redis lost it", self._model)
        except TokenmillError as error:
            _log.warning("route of %s not looked at again: %s", self._model, error)

    async def rollback(self, wait_s: float, tell: "Tell") -> dict[str, float]:
        """Goes back to before the last switch; see `Client.rollback_version`."""
        seen, specs = await self._patiently(self._versions.read)
        for version in sorted(seen.previous):
            spec = specs.get(version)
            groups = await self._patiently(self._life.groups)
            live = self._life.serves(version, groups)
            if spec is None and live:
                continue
            if spec is None or spec.state != "ready" or not live:
                tell(f"{version} has no workers that are ready; loading it")
                await self.load(version, wait_s, tell)
        return self._kept(await self._patiently(lambda: self._versions.rollback(seen)))

    async def drain(
        self, version: str, wait_s: float | None, tell: "Tell"
    ) -> VersionInfo:
        """Has a version end; see `Client.drain_version`."""
        draining = Draining(self._session, self._model, self._partitions)
        return await draining.run(version, self.info, wait_s, tell)

    async def remove(self, version: str) -> None:
        """Forgets a version; see `Client.remove_version`."""
        tries = 0

        async def removed() -> None:
            nonlocal tries
            tries += 1
            specs = await self._versions.specs()
            if tries > 1 and version not in specs:
                return  # the reply to a try before was lost
            self._life.known(version, specs)
            await self._require_unused(version)
            await self._versions.remove(version)

        await self._patiently(removed)
        await self._patiently(lambda: forget_report(self._client, self._model, version))

    async def _require_unused(self, version: str) -> None:
        groups = [one for one in await self._life.groups() if one.version == version]
        if groups:
            raise VersionConflict(
                f"version {version} of {self._model} has {len(groups)} live workers; "
                f"first tokenmill models drain {self._model} {version}"
            )
        for partition in range(self._partitions):
            keys = Keys(self._model, partition)
            if job_id := await waiting_job(self._client, keys, version):
                raise VersionConflict(
                    f"job {job_id}, and perhaps others, waits for version {version} of "
                    f"{self._model} alone; cancel it, or first tokenmill models load "
                    f"{self._model} {version}"
                )


def _says_the_same(known: VersionSpec, spec: VersionSpec) -> bool:
    return replace(known, created_ms=0, updated_ms=0) == spec


def _progress(info: VersionInfo, waited_s: float, model: str) -> str:
    """What a person wants to know while a version loads."""
    text = f"{info.version} is {info.state}"
    if info.reason or info.failures:
        found = filter(None, (info.reason, where_not(info.failures)))
        return f"{text}: {'; '.join(found)}"
    if info.groups:
        return f"{text} with {info.groups} workers; a partition waits for one"
    if waited_s > _UNSEEN_S:
        return (
            f"{text}; no worker of it yet. `tokenmill up` starts them; by hand: "
            f"{_by_hand(model, info.version)}"
        )
    return text


def _by_hand(model: str, version: str) -> str:
    return f"tokenmill work --name {model} --version {version}"


def _check(model: ModelConfig) -> None:
    """Refuses settings that cannot be, by the names that the caller knows.

    Raises:
        ConfigError: Names the setting.
    """
    try:
        check(Config(models=(model,)), {})
    except ConfigError as error:
        name = error.key.removeprefix("models[0].")
        raise ConfigError(name, error.problem) from None
