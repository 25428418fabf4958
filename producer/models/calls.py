"""The versions of models as methods of both clients."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...shared.config_model import ModelConfig
from ...shared.health_set import HealthSet
from ...shared.shadow_report import ShadowReport
from ..session import Session
from .info import VersionInfo

if TYPE_CHECKING:
    from ..client import Client
    from ..sync import LoopThread
    from .operations import ModelVersions

Tell = Callable[[str], None]
"""Told of progress, a line each time that something has changed."""


def _silent(_text: str) -> None:
    pass


class VersionCalls:
    """What `Client` can do with versions; docs/models.md tells their life."""

    @property
    def _session(self) -> Session:
        raise NotImplementedError

    async def _versions_of(self, model: str) -> "ModelVersions":
        from .operations import ModelVersions

        pool = await self._session.patiently(self._session.view.pool)
        return ModelVersions(self._session, model, pool.partitions)

    async def model_versions(self, model: str | None = None) -> list[VersionInfo]:
        """Returns the versions of one model, or of all models, by name.

        Raises:
            InvalidRequest: The pool has never heard of the model.
        """
        from ...shared.adapters_registry import AdapterRegistry
        from .info import with_unserved
        from .operations import models_with_versions, require_model

        found: list[VersionInfo] = []
        known = await models_with_versions(self._session)
        for name in [model] if model else known:
            infos = await (await self._versions_of(name)).infos()
            registry = AdapterRegistry(self._session.redis, name)
            cards = await self._session.patiently(registry.cards) if infos else []
            found += with_unserved(infos, cards)
        if model and not found:
            require_model(model, known)
        return found

    async def add_version(
        self, model: ModelConfig, health: HealthSet | None = None
    ) -> VersionInfo:
        """Describes a version to the pool; nothing is loaded by that.

        Args:
            model: What its workers load; names model and version.
            health: What has to pass before it is ready.

        Raises:
            ConfigError: A setting cannot be.
            VersionConflict: The name is in use.
        """
        versions = await self._versions_of(model.name)
        return await versions.add(model, health)

    async def load_version(
        self,
        model: str,
        version: str,
        *,
        wait_s: float | None = 600.0,
        tell: Tell = _silent,
    ) -> VersionInfo:
        """Has a version loaded beside those that serve, and waits until it is ready.

        Args:
            model: Public name.
            version: One that was added.
            wait_s: How long to wait; None does not.
            tell: Told of progress.

        Raises:
            UnknownVersion: There is no such version.
            VersionFailed: It could not be loaded, or did not pass its health set.
            ResultTimeout: It is not ready yet; it goes on loading.
        """
        return await (await self._versions_of(model)).load(version, wait_s, tell)

    async def shadow_version(
        self, model: str, version: str, percent: float
    ) -> ShadowReport:
        """Has a part of the traffic copied to a version; 0 ends it.

        Raises:
            InvalidRequest: It is no percentage.
            UnknownVersion: There is no such version.
            VersionConflict: It is not ready, or serves all jobs itself.
        """
        return await (await self._versions_of(model)).shadow(version, percent)

    async def shadow_report(self, model: str, version: str) -> ShadowReport:
        """Returns how copies to a version compare with their originals."""
        return await (await self._versions_of(model)).report(version)

    async def switch_version(
        self,
        model: str,
        version: str,
        percent: float = 100.0,
        *,
        force: bool = False,
        tell: Tell = _silent,
    ) -> dict[str, float]:
        """Gives new jobs to a version from now on.

        Args:
            model: Public name.
            version: One that is ready.
            percent: Its share; the others keep theirs in proportion.
            force: Even if it cannot serve the model's adapters; its workers are asked
                once they have jobs.
            tell: Told of adapters that are lost, or about which nobody has answered.

        Returns:
            Version -> percent.

        Raises:
            InvalidRequest: It is no percentage.
            UnknownVersion: There is no such version.
            VersionConflict: It is not ready, a partition has no live group of it, or it
                cannot serve an adapter that is served now.
        """
        from ...shared.routes import check_percent
        from ..adapters.fitting import ask_about_all, tell_what_is_lost

        check_percent(version, percent)  # asking about adapters may take a minute
        versions = await self._versions_of(model)
        if percent > 0 and not force:
            answers = await ask_about_all(self._session, model, version)
            answers.require_all()
            if answers.unsure:
                names = ", ".join(answers.unsure)
                tell(f"not checked on {version}, nobody answered: {names}")
        shares = await versions.switch(version, percent)
        if percent > 0 and force:
            await tell_what_is_lost(self._session, model, version, tell)
        return shares

    async def rollback_version(
        self, model: str, *, wait_s: float = 600.0, tell: Tell = _silent
    ) -> dict[str, float]:
        """Gives new jobs to whom they went before the last switch.

        Versions of then that are stopped are loaded first.

        Returns:
            Version -> percent.

        Raises:
            VersionConflict: There was no switch.
            VersionFailed: A version of then cannot be loaded any more.
        """
        return await (await self._versions_of(model)).rollback(wait_s, tell)

    async def drain_version(
        self,
        model: str,
        version: str,
        *,
        wait_s: float | None = 600.0,
        tell: Tell = _silent,
    ) -> VersionInfo:
        """Has a version end what it runs, and its workers stop.

        Raises:
            UnknownVersion: There is no such version.
            VersionConflict: It has a share of the jobs.
            ResultTimeout: It still runs some; it goes on draining.
        """
        return await (await self._versions_of(model)).drain(version, wait_s, tell)

    async def remove_version(self, model: str, version: str) -> None:
        """Forgets a version that has no workers any more.

        Raises:
            UnknownVersion: There is no such version.
            VersionConflict: It has a share, workers, or jobs that wait for it alone.
        """
        await (await self._versions_of(model)).remove(version)

    async def retire_model(
        self, model: str, *, wait_s: float = 600.0, tell: Tell = _silent
    ) -> None:
        """Ends a model and forgets it, with all its versions.

        It takes no new jobs from now on; those that it has end, its workers after them.

        Args:
            model: One that the settings of the pool do not name.
            wait_s: How long to wait.
            tell: Told of progress.

        Raises:
            InvalidRequest: The pool has never heard of the model.
            VersionConflict: The settings name it, jobs wait that nobody serves, or it
                was taken back meanwhile.
            ResultTimeout: It still has jobs or workers; called again, this goes on.
        """
        from .retiring import retire

        await retire(self._session, model, wait_s, tell)


class SyncVersionCalls:
    """The same for `SyncClient`."""

    _client: "Client"

    @property
    def _thread(self) -> "LoopThread":
        raise NotImplementedError

    def model_versions(self, model: str | None = None) -> list[VersionInfo]:
        """Returns versions; see `Client.model_versions`."""
        return self._thread.run(self._client.model_versions(model))

    def add_version(
        self, model: ModelConfig, health: HealthSet | None = None
    ) -> VersionInfo:
        """Describes a version to the pool; see `Client.add_version`."""
        return self._thread.run(self._client.add_version(model, health))

    def load_version(
        self, model: str, version: str, *, wait_s: float | None = 600.0
    ) -> VersionInfo:
        """Has a version loaded; see `Client.load_version`."""
        work = self._client.load_version(model, version, wait_s=wait_s)
        return self._thread.run(work)

    def shadow_version(self, model: str, version: str, percent: float) -> ShadowReport:
        """Has traffic copied to a version; see `Client.shadow_version`."""
        return self._thread.run(self._client.shadow_version(model, version, percent))

    def shadow_report(self, model: str, version: str) -> ShadowReport:
        """Returns how copies compare; see `Client.shadow_report`."""
        return self._thread.run(self._client.shadow_report(model, version))

    def switch_version(
        self,
        model: str,
        version: str,
        percent: float = 100.0,
        *,
        force: bool = False,
    ) -> dict[str, float]:
        """Gives new jobs to a version; see `Client.switch_version`."""
        work = self._client.switch_version(model, version, percent, force=force)
        return self._thread.run(work)

    def rollback_version(
        self, model: str, *, wait_s: float = 600.0
    ) -> dict[str, float]:
        """Goes back to before the last switch; see `Client.rollback_version`."""
        return self._thread.run(self._client.rollback_version(model, wait_s=wait_s))

    def drain_version(
        self, model: str, version: str, *, wait_s: float | None = 600.0
    ) -> VersionInfo:
        """Has a version end; see `Client.drain_version`."""
        work = self._client.drain_version(model, version, wait_s=wait_s)
        return self._thread.run(work)

    def remove_version(self, model: str, version: str) -> None:
        """Forgets a version; see `Client.remove_version`."""
        self._thread.run(self._client.remove_version(model, version))

    def retire_model(self, model: str, *, wait_s: float = 600.0) -> None:
        """Ends a model; see `Client.retire_model`."""
        self._thread.run(self._client.retire_model(model, wait_s=wait_s))
