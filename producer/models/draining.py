"""The end of a version that is to stop, watched by a client: what it waits for."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from ...shared.errors import ResultTimeout
from ...shared.keys import Keys
from ...shared.version_groups import begun_elsewhere, pinned_jobs
from ...shared.version_life import VersionLife
from ..session import Session
from .info import VersionInfo

if TYPE_CHECKING:
    from .calls import Tell

LOOK_EVERY_S: Final = 0.25
COUNT_EVERY_S: Final = 3.0
"""Between two counts of jobs, for which their records are read."""


class Draining:
    """The end of versions of one model.

    Args:
        session: The client's connections.
        model: Public name.
        partitions: How many the pool has.
    """

    def __init__(self, session: Session, model: str, partitions: int) -> None:
        self._client = session.redis
        self._patiently = session.patiently
        self._model = model
        self._shards = [Keys(model, number) for number in range(partitions)]
        self._life = VersionLife(self._client, model, partitions)
        self._counted_at = float("-inf")
        self._counted_groups = 0
        self._words = ""
        """What keeps the version, as of the last count."""

    async def run(
        self,
        version: str,
        look: Callable[[str], Awaitable[VersionInfo]],
        wait_s: float | None,
        tell: "Tell",
    ) -> VersionInfo:
        """Has a version end; see `Client.drain_version`.

        Args:
            version: Which.
            look: Returns what is known of it.
            wait_s: How long to wait; None does not.
            tell: Told of what it waits for, each time that it is something else.
        """
        await self._patiently(lambda: self._life.begin_drain(version))
        began, said = time.monotonic(), ""
        while wait_s is not None:
            info = await look(version)
            if info.state != "draining":
                break
            if not info.groups:
                await self.stop_without_workers(version, info.weights_version)
            now = await self._what_it_waits_for(info)
            if now != said:
                tell(now)
                said = now
            if time.monotonic() - began > wait_s:
                raise ResultTimeout(
                    f"version {version} of {self._model} still drains after "
                    f"{wait_s:g} s ({now}); it goes on"
                )
            await asyncio.sleep(LOOK_EVERY_S)
        return await look(version)

    async def stop_without_workers(self, version: str, weights: str | None) -> None:
        """Marks a version that drains as stopped, unless jobs wait for it.

        Args:
            version: Of which no worker lives, so that nobody else says it.
            weights: Of its workers.
        """
        for keys in self._shards:
            needed = partial(
                self._life.is_needed, version, weights or "", keys.partition
            )
            if await self._patiently(needed):
                return
        versions = self._life.versions
        await self._patiently(
            lambda: versions.set_state(version, "stopped", only_from=("draining",))
        )

    async def _what_it_waits_for(self, info: VersionInfo) -> str:
        """Counts anew now and then, and when a worker has left: people read it."""
        now = time.monotonic()
        is_old = now - self._counted_at >= COUNT_EVERY_S
        if is_old or info.groups != self._counted_groups:
            held = await self._patiently(lambda: self._what_keeps(info))
            self._words = (
                f"{info.version} drains: {info.groups} workers, {info.running} running"
                f"{held}"
            )
            self._counted_at, self._counted_groups = now, info.groups
        return self._words

    async def _what_keeps(self, info: VersionInfo) -> str:
        """Jobs that keep a version from its end, besides those that run by chance."""
        running = waiting = begun = 0
        for keys in self._shards:
            pinned = await pinned_jobs(self._client, keys, info.version)
            running, waiting = running + pinned.running, waiting + pinned.waiting
            if info.weights_version and not info.running:
                begun += await begun_elsewhere(
                    self._client, keys, info.weights_version, ""
                )
        held = f"; {begun} that it has begun wait to go on" if begun else ""
        if running or waiting:
            held += (
                f"; {running} running and {waiting} waiting jobs are for "
                f"{info.version} alone, which takes no more of them"
            )
        return held
