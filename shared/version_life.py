"""What clients, workers and supervisors do with a version in the same way.

What stands in Redis, and its atomic changes, are `versions.py`; here is what has to be
looked at before: live groups, and who serves while nobody has said so.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from .errors import UnknownVersion, VersionConflict
from .version_groups import LiveGroup, live_groups, serving_partitions
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
        serving = {one.version for one in await self.groups() if not one.draining}
        serving |= {name for name, spec in specs.items() if spec.state == "ready"}
        serving.discard(version)
        if serving:
            await self.versions.fix(equal_shares(sorted(serving)))

    async def begin_load(self, version: str) -> VersionSpec:
        """Has a version loaded by whoever watches: supervisors, workers by hand.

        Args:
            version: One that was added. One that drains is taken back.

        Raises:
            UnknownVersion: There is no such version.
        """
        spec = self.known(version, await self.versions.specs())
        if spec.state in ("ready", "loading"):
            return spec
        await self.keep_share(version)
        serves = self.serves(version, await self.groups())
        if (
            spec.state == "draining"
            and serves
            and await self.versions.set_state(version, "ready", only_from=("draining",))
        ):
            return spec
        await self.versions.set_state(version, "loading")
        return spec

    def serves(self, version: str, groups: Sequence[LiveGroup]) -> bool:
        """Whether a version has a live group in every partition."""
        return len(serving_partitions(groups, version)) >= self._partitions

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
        share = route.shares.get(version, 0.0)
        if not route.shares:
            groups = await self.groups()
            others = {one.version for one in groups} - {version}
            share = 0.0 if others or not groups else 100.0
        if share:
            raise VersionConflict(self._why_not_drained(version, share, specs))
        if route.shadow.get(version):
            await self.versions.shadow(version, 0)
        await self.versions.set_state(
            version, "draining", only_from=("loading", "ready", "draining")
        )

    def _why_not_drained(
        self, version: str, share: float, specs: Mapping[str, VersionSpec]
    ) -> str:
        found = f"version {version} of {self._model} gets {share:g} % of its jobs"
        ready = [n for n, s in specs.items() if s.state == "ready" and n != version]
        command = f"tokenmill models switch {self._model}"
        if ready:
            return f"{found}; first {command} {min(ready)}"
        return (
            f"{found} and is the only one that could; load another and {command} to "
            "it, or stop its workers to end the model altogether"
        )

    def known(self, version: str, specs: Mapping[str, VersionSpec]) -> VersionSpec:
        """Returns a version that was added.

        Raises:
            UnknownVersion: There is no such version.
        """
        spec = specs.get(version)
        if spec is None:
            names = ", ".join(sorted(specs)) or "none"
            raise UnknownVersion(
                f"there is no version {version} of {self._model}; known: {names}. Add "
                f"it with tokenmill models add {self._model} {version}"
            )
        return spec


def equal_shares(versions: Sequence[str]) -> dict[str, float]:
    """Returns shares that are as equal as hundredths of a percent allow."""
    steps, more = divmod(10_000, len(versions))
    return {
        version: (steps + (place < more)) / 100
        for place, version in enumerate(versions)
    }
