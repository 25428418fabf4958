"""The versions of a model: what they are, how they are, and who gets its jobs.

One hash a model, changed by one script: whoever reads it sees each change whole.
"""

import random
from asyncio import sleep
from collections.abc import Collection, Mapping
from typing import Final, cast

import redis.asyncio
import structlog

from . import version_changes as changes
from .clock import time_ms
from .config_model import ModelConfig
from .errors import VersionConflict
from .health_set import HealthReport
from .keys import MODELS, Keys
from .messages import encode
from .redis import translate
from .routes import Route as Route
from .script_runner import ScriptRunner, text
from .version_keys import VERSIONED, cards_key, versions_key
from .version_records import ROUTE, SPEC, decode_route, decode_spec
from .version_records import VersionSpec as VersionSpec
from .version_records import VersionState as VersionState
from .version_restoring import is_lost, restored
from .version_retiring import drained, removed

_TRIES: Final = 20
"""Times that a change is made again because of another one in between."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.005, 1.0
"""Between two of them: hundreds of workers may begin at the same moment."""
_log = structlog.get_logger(__name__)


class Versions:
    """The versions of one model. All changes are atomic.

    Args:
        client: Redis; replies are bytes.
        model: Public name.
    """

    def __init__(self, client: "redis.asyncio.Redis", model: str) -> None:
        self._redis = client
        self._model = model
        self._runner = ScriptRunner(client, Keys(model, 0))
        self._seen: tuple[object, tuple[Route, dict[str, VersionSpec]]] | None = None

    async def read(self) -> tuple[Route, dict[str, VersionSpec]]:
        """Returns the route (one of nobody where there is none) and all versions.

        Raises:
            ProtocolError: What stands in Redis is not ours.
        """
        route, specs, _ = await self._read()
        return route, specs

    async def follow(self) -> tuple[Route, dict[str, VersionSpec]]:
        """The same for who looks again and again.

        Specifications, with their health sets, may be large: they are read again only
        after a change. What Redis has lost meanwhile is written again, as last seen.

        Raises:
            ProtocolError: What stands in Redis is not ours.
        """
        with translate():
            raw = await self._redis.hget(versions_key(self._model), ROUTE)  # type: ignore[misc]
        if self._seen is None or raw != self._seen[0]:
            found = await self.read()
            if self._seen is not None and is_lost(self._seen[1][0], found[0]):
                await self._restore(*self._seen[1])
                found = await self.read()
            self._seen = raw, found
        return self._seen[1]

    async def _restore(self, route: Route, specs: Mapping[str, VersionSpec]) -> None:
        """Others may know what is newer, or be faster: then theirs stays."""
        adding = (changes.added(self._model, s, replace=False) for s in specs.values())
        for decide in (restored(route), *adding):
            try:
                if (await self.change(decide))[1]:
                    _log.warning("versions_written_again", model=self._model)
            except VersionConflict as error:
                _log.debug("not_written_again", model=self._model, error=str(error))

    async def route(self) -> Route | None:
        """Returns who gets the model's jobs; None while every version may serve."""
        route, _ = await self.read()
        return route if route.shares else None

    async def specs(self) -> dict[str, VersionSpec]:
        """Returns the versions by name."""
        return (await self.read())[1]

    async def fix(self, shares: Mapping[str, float]) -> Route:
        """Writes down who serves a model without a route, before others come.

        Args:
            shares: Version -> percent. A version needs no specification: workers that
                were started by hand serve as well.

        Returns:
            The route; that which there was, where there was one.
        """
        return (await self.change(changes.fixed(shares)))[0]

    async def add(self, spec: VersionSpec, *, replace: bool = False) -> Route:
        """Adds a version, which gets no share by that.

        Args:
            spec: Its `model.version` is its `version`.
            replace: Takes the place of one of that name, where there is one.

        Raises:
            VersionConflict: The name is in use.
        """
        decide = changes.added(self._model, spec, replace=replace)
        return (await self.change(decide))[0]

    async def set_state(
        self,
        version: str,
        state: VersionState,
        *,
        reason: str = "",
        only_from: Collection[str] | None = None,
        weights_version: str | None = None,
        health_report: HealthReport | None = None,
    ) -> bool:
        """Says how a version is.

        Args:
            version: Its name.
            state: What it is from now on.
            reason: Why.
            only_from: States in which it may be before; None: any.
            weights_version: What its workers loaded; None leaves what is known.
            health_report: Likewise.

        Returns:
            False where nothing is changed: not in `only_from`, or all of it is known.

        Raises:
            UnknownVersion: There is no such version.
        """
        decide = changes.stated(
            self._model,
            version,
            state,
            reason=reason,
            only_from=only_from,
            weights_version=weights_version,
            health_report=health_report,
        )
        return (await self.change(decide))[1]

    async def renew(self, version: str, config: ModelConfig) -> bool:
        """Records what a version is loaded with, where that is not what is known.

        Returns:
            Whether anything has changed.

        Raises:
            UnknownVersion: There is no such version.
        """
        return (await self.change(changes.renewed(self._model, version, config)))[1]

    async def drain(self, version: str) -> bool:
        """Has a version end, and nothing copied to it any more.

        Returns:
            Whether it runs at all.

        Raises:
            UnknownVersion: There is no such version.
            VersionConflict: It has a share of the jobs.
        """
        return (await self.change(drained(self._model, version)))[1]

    async def switch(self, shares: Mapping[str, float]) -> Route:
        """Gives new jobs to these versions from now on; `rollback` goes back.

        Args:
            shares: Version -> percent, 100 in all.

        Raises:
            InvalidRequest: The shares are not 100 together.
            UnknownVersion: One is not known.
            VersionConflict: One is not ready.
        """
        return (await self.change(changes.switched(self._model, shares)))[0]

    async def move(self, version: str, percent: float) -> Route:
        """Gives a version a share of new jobs; the others divide what is left.

        Raises:
            InvalidRequest: It is no percentage.
            UnknownVersion: There is no such version.
            VersionConflict: One with a share is not ready, or nobody could take the
                rest.
        """
        return (await self.change(changes.moved(self._model, version, percent)))[0]

    async def rollback(self, seen: Route | None = None) -> Route:
        """Gives new jobs to whom they went before the last switch.

        Args:
            seen: The route that is to be undone; None: whichever there is.

        Raises:
            VersionConflict: There was none, a version of then is not ready, or the
                shares are others than those that were seen.
        """
        if seen is None:
            # Asked twice, as after a reply that was lost, it would go forward again.
            seen, _ = await self.read()
        return (await self.change(changes.rolled_back(self._model, seen)))[0]

    async def shadow(self, version: str, percent: float) -> Route:
        """Has a part of the traffic copied to a version.

        Args:
            version: Which; it has to be ready.
            percent: 0 ends it.

        Raises:
            InvalidRequest: It is no percentage.
            UnknownVersion: There is no such version.
            VersionConflict: It is not ready.
        """
        return (await self.change(changes.shadowed(self._model, version, percent)))[0]

    async def remove(self, version: str) -> Route:
        """Forgets a version. Its workers are to be stopped before.

        Raises:
            UnknownVersion: There is no such version.
            VersionConflict: It has a share, or traffic is copied to it.
        """
        return (await self.change(removed(self._model, version)))[0]

    async def _read(self) -> tuple[Route, dict[str, VersionSpec], int]:
        key = versions_key(self._model)
        with translate():
            pipe = self._redis.pipeline(transaction=False)
            pipe.time()
            pipe.hgetall(key)
            time, row = await pipe.execute()
        fields = {text(k): v for k, v in cast("dict[bytes, bytes]", row).items()}
        specs = {
            name.removeprefix(SPEC): decode_spec(raw, key)
            for name, raw in fields.items()
            if name.startswith(SPEC)
        }
        return decode_route(fields.get(ROUTE), key), specs, time_ms(time)

    async def change(self, decide: changes.Decide) -> tuple[Route, bool]:
        """Reads, decides and writes, again where somebody has written in between.

        Args:
            decide: What is to be changed, from what there is.

        Returns:
            The route as it stands now, and whether this has changed it.

        Raises:
            VersionConflict: The change is not allowed.
        """
        for tried in range(_TRIES):
            route, specs, now_ms = await self._read()
            change = decide(route, specs, now_ms)
            if change is None:
                return route, False
            status, detail = await self._write(route.serial, change)
            if status == "done":
                return change.route, True
            if status == "refused":
                raise VersionConflict(f"{self._model}: {detail}")
            wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**tried)
            await sleep(random.uniform(0, wait_s))  # noqa: S311 - jitter
        raise VersionConflict(
            f"the versions of {self._model} are being changed all the time; try again"
        )

    async def _write(self, serial: int, change: changes.Change) -> tuple[str, str]:
        model, spec = self._model, change.spec
        reply = await self._runner.run_list(
            "route_change",
            [versions_key(model), cards_key(model), MODELS, VERSIONED],
            [
                *(model, serial, encode(change.route), change.action, change.version),
                b"" if spec is None else encode(spec),
            ],
        )
        status, detail = map(text, reply)
        return status, detail
