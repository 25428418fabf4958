"""The end of a model that nobody is to serve any more, asked for by a client."""

import asyncio
import time
from typing import TYPE_CHECKING, Final

from ...shared.errors import ResultTimeout, UnknownVersion, VersionConflict
from ...shared.keys import SHARDS, Keys, is_shard
from ...shared.script_runner import text
from ...shared.shadow_report import forget_report
from ...shared.version_groups import open_job
from ...shared.version_life import VersionLife
from ...shared.version_retiring import emptied, forgotten, retiring
from ..pool_view import PoolView
from ..session import Session
from .draining import LOOK_EVERY_S, Draining
from .operations import models_with_versions, require_model

if TYPE_CHECKING:
    from .calls import Tell

SETTLE_S: Final = 2.0
"""A model has had no job for so long before its workers end: producers that have looked
before it retired, or wait for room, may still enqueue some for a second or two."""


async def retire(session: Session, model: str, wait_s: float, tell: "Tell") -> None:
    """Ends a model; see `Client.retire_model`."""
    require_model(model, await models_with_versions(session))
    # A client that has been open for long knows the settings of before.
    pool = await PoolView(session.redis).pool()
    if model in pool.models:
        raise VersionConflict(
            f"{model} is in the settings of this pool, which start it again; take it "
            "out of them, start the pool with that, and retire what is left"
        )
    partitions = await _partitions(session, model, pool.partitions)
    await _Retirement(session, model, partitions).run(wait_s, tell)


async def _partitions(session: Session, model: str, configured: int) -> int:
    """Those of the pool, or of before, when there may have been more."""
    (members,) = await session.read(("SMEMBERS", SHARDS))
    shards = [Keys.of_shard(one) for one in map(text, members) if is_shard(one)]
    known = [keys.partition + 1 for keys in shards if keys.model == model]
    return max([configured, *known])


class _Retirement:
    def __init__(self, session: Session, model: str, partitions: int) -> None:
        self._client = session.redis
        self._patiently = session.patiently
        self._model = model
        self._shards = [Keys(model, number) for number in range(partitions)]
        self._life = VersionLife(self._client, model, partitions)
        self._draining = Draining(session, model, partitions)
        self._versions = self._life.versions

    async def run(self, wait_s: float, tell: "Tell") -> None:
        """Goes on from wherever an earlier call has stopped."""
        await self._patiently(self._require_an_end)
        await self._patiently(lambda: self._versions.change(retiring))
        tell(f"{self._model} takes no new jobs; those that it has are ended first")
        began = quiet_since = time.monotonic()
        while True:
            job_id, now = await self._patiently(self._open_job), time.monotonic()
            if job_id:
                quiet_since = now
            elif now - quiet_since >= SETTLE_S and await self._has_ended():
                return
            if now - began > wait_s:
                what = f"job {job_id} has not ended" if job_id else "its workers end"
                raise ResultTimeout(
                    f"{self._model} still retires after {wait_s:g} s ({what}) and "
                    f"has no new jobs; tokenmill models retire {self._model} goes on"
                )
            await asyncio.sleep(LOOK_EVERY_S)

    async def _require_an_end(self) -> None:
        """Refuses a model with jobs that nobody would end."""
        if await self._life.groups():
            return
        if job_id := await self._open_job():
            specs = await self._versions.specs()
            version = min(specs, default="VERSION")
            raise VersionConflict(
                f"job {job_id}, and perhaps others, waits for {self._model}, which has "
                f"no live worker; tokenmill cancel {job_id}, or first tokenmill work "
                f"--name {self._model} --version {version}"
            )

    async def _open_job(self) -> str | None:
        for keys in self._shards:
            if job_id := await open_job(self._client, keys):
                return job_id
        return None

    async def _has_ended(self) -> bool:
        try:
            return await self._patiently(self._end)
        except UnknownVersion:
            return False  # another command has just forgotten it: seen at the next look

    async def _end(self) -> bool:
        """Takes what steps can be taken now; whether that was the last one."""
        await self._versions.change(emptied(self._model))
        groups = await self._life.groups()
        specs = await self._versions.specs()
        for version, spec in specs.items():
            if spec.state in ("loading", "ready"):
                await self._versions.drain(version)
            elif spec.state == "draining" and not groups:
                await self._draining.stop_without_workers(version, spec.weights_version)
        if groups:
            return False
        for version in specs:
            await forget_report(self._client, self._model, version)
        route, done = await self._versions.change(forgotten(self._model))
        return done or not route.serial
