"""What clients, workers and supervisors do with a version in the same way.

What stands in Redis, and its atomic changes, are `versions.py`; here is what has to be
looked at before: live groups, and who serves while nobody has said so.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from .errors import VersionConflict
from .keys import Keys
from .routes import apportioned
from .version_changes import find
from .version_failing import tried_again
from .version_groups import (
    LiveGroup,
    begun_elsewhere,
    live_groups,
    serving_partitions,
)
from .version_retiring import taken_back, why_not_drained
from .versions import Versions, VersionSpec

if TYPE_CHECKING:
    import redis.asyncio

_HINTS: Final = {
    "added": "it was never loaded",
    "loading": "it is still loading",
    "failed": "it has failed",
    "draining": "it drains",
    "stopped": "it is stopped",
}


class VersionLife:
    """The versions of one model of a pool, with the groups that serve them.

    Args:
        client: Redis; replies are bytes.
        model: Public name.
        partitions: How many the pool has.
    """

    def __init__(
        self, client: "redis.asyncio.Redis", model: str, partitions: int
    ) -> None:
        self._client = client
        self._model = model
        self._partitions = partitions
        self.versions = Versions(client, model)

    async def groups(self) -> list[LiveGroup]:
        """Returns the live groups of all versions."""
        return await live_groups(self._client, self._model, self._partitions)

    async def keep_share(self, version: str) -> None:
        """Makes sure that a version which is about to start gets no share by that.

        While nobody has said who serves, every version does; so those that serve now
        are written down first.

        Args:
            version: The one that is about to start.
        """
        route, specs = await self.versions.read()
        if route.shares:
            return
        serving = await self._serving(specs) - {version}
        if serving:
            await self._fix(serving)

    async def claim(self, version: str) -> None:
        """The same for one that is about to announce itself: the first of a model
        that has versions serves it, and whoever comes after it gets no share.

        Args:
            version: One that is ready, or that nobody has described.
        """
        route, specs = await self.versions.read()
        if route.shares or not _may_serve(specs, version):
            return
        await self._fix(await self._serving(specs) - {version} or {version})

    async def settle(self, version: str) -> None:
        """Writes down who serves: all that do now or, where none does, one version.

        Args:
            version: That of the settings.
        """
        route, specs = await self.versions.read()
        if not route.shares and _may_serve(specs, version):
            await self._fix(await self._serving(specs) or {version})

    async def _serving(self, specs: Mapping[str, VersionSpec]) -> set[str]:
        live = {one.version for one in await self.groups() if not one.draining}
        return {one for one in {*live, *specs} if _may_serve(specs, one)}

    async def _fix(self, serving: set[str]) -> None:
        await self.versions.fix(apportioned(dict.fromkeys(sorted(serving), 1.0)))

    async def begin_load(self, version: str) -> VersionSpec:
        """Has a version loaded by whoever watches: supervisors, workers by hand.

        Args:
            version: One that was added. One that drains, and a model that retires,
                is taken back.

        Raises:
            UnknownVersion: There is no such version.
        """
        spec = self.known(version, await self.versions.specs())
        await self.versions.change(taken_back)
        if spec.state in ("ready", "loading"):
            await self.versions.change(tried_again(self._model, version))
            return spec
        await self.keep_share(version)
        serves = self.serves(version, await self.groups())
        if (
            spec.state == "draining"
            and serves
            and await self.versions.set_state(version, "ready", only_from=("draining",))
        ):
            return spec
        # Not one that somebody else has got ready since: its workers say so but once.
        idle = ("added", "failed", "draining", "stopped")
        await self.versions.set_state(version, "loading", only_from=idle)
        return spec

    async def is_needed(
        self, version: str, weights: str, partition: int, group: str = ""
    ) -> bool:
        """Whether jobs of a partition that were begun with these weights hang on a
        version that drains: nobody else has them.

        Args:
            version: That drains.
            weights: Of its workers.
            partition: Where.
            group: Who asks; it knows of its own jobs.
        """
        if not weights:
            return False
        specs = await self.versions.specs()
        others = (one for one in await self.groups() if one.version != version)
        if any(
            (one.partition, one.weights_version) == (partition, weights)
            and not one.draining
            and _may_serve(specs, one.version)
            for one in others
        ):
            return False
        keys = Keys(self._model, partition)
        return bool(await begun_elsewhere(self._client, keys, weights, group))

    def serves(self, version: str, groups: Sequence[LiveGroup]) -> bool:
        """Whether a version has a live group in every partition."""
        return len(serving_partitions(groups, version)) >= self._partitions

    async def require_free(self, version: str) -> None:
        """Refuses the name of a version that is served and that nobody has described.

        Raises:
            VersionConflict: Workers of it live.
        """
        if version in await self.versions.specs():
            return  # that is found, and said, by who adds it
        live = sum(one.version == version for one in await self.groups())
        if live:
            raise VersionConflict(
                f"the version name {version} of {self._model} is in use: {live} live "
                "workers serve under it; choose another"
            )

    async def require_live(self, version: str) -> None:
        """Refuses a version that could not take jobs now.

        Raises:
            UnknownVersion: There is no such version.
            VersionConflict: It is not ready, or has no live group in some partition;
                says what would help.
        """
        specs, groups = await self.versions.specs(), await self.groups()
        if version not in specs and any(one.version == version for one in groups):
            state = "ready"  # workers that were started by hand and never described
        else:
            state = self.known(version, specs).state
        load = f"tokenmill models load {self._model} {version}"
        if state != "ready":
            reason = specs[version].reason
            why = f": {reason}" if state == "failed" and reason else ""
            raise VersionConflict(
                f"version {version} of {self._model} is not ready, {_HINTS[state]}"
                f"{why}; get it ready with {load}"
            )
        missing = set(range(self._partitions)) - serving_partitions(groups, version)
        if missing:
            names = ", ".join(map(str, sorted(missing)))
            raise VersionConflict(
                f"version {version} of {self._model} has no live worker in partition "
                f"{names}; wait for one, or see what keeps it with {load}"
            )

    async def begin_drain(self, version: str) -> None:
        """Has a version end what it runs and its workers stop after that.

        Raises:
            UnknownVersion: There is no such version.
            VersionConflict: It gets jobs; says who could get them instead.
        """
        route, specs = await self.versions.read()
        self.known(version, specs)
        if not route.shares:
            groups = await self.groups()
            if groups and {one.version for one in groups} == {version}:
                shares = {version: 100.0}
                raise VersionConflict(
                    why_not_drained(self._model, version, shares, specs)
                )
        await self.versions.drain(version)

    def known(self, version: str, specs: Mapping[str, VersionSpec]) -> VersionSpec:
        """Returns a version that was added.

        Raises:
            UnknownVersion: There is no such version.
        """
        return find(self._model, specs, version)


def _may_serve(specs: Mapping[str, VersionSpec], version: str) -> bool:
    """Whether a version is ready, or served by workers that nobody has described."""
    return version not in specs or specs[version].state == "ready"
