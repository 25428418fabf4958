"""The newest jobs of tenants that are watched, kept up to date by what has come since.

Among many jobs of others, finding a tenant's newest takes thousands of reads. That is
done once; a later look reads what was queued since the one before, once for all
tenants, and the few records that are shown.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from ..shared.errors import ProtocolError, UnknownJob
from ..shared.keys import SHARDS, JobId, Keys, is_shard
from .info import JobInfo
from .job_pages import Place, jobs_page, records

if TYPE_CHECKING:
    from .client import Client

MOST_NEW: Final = 5000
"""Jobs of a shard that one look goes through; of more only so many newest."""


class NewestJobs:
    """Knows which jobs are the newest of each tenant that is watched.

    Args:
        client: Open by the first look.
        limit: Most jobs of a tenant.
    """

    def __init__(self, client: "Client", limit: int) -> None:
        self._client = client
        self._limit = limit
        self._seen: dict[str, int] = {}
        """Shard -> when the newest job was queued that was looked at."""
        self._ids: dict[str, list[str]] = {}
        """Tenant -> ids of its newest jobs, newest first."""

    async def look(self, tenants: Collection[str]) -> dict[str, tuple[JobInfo, ...]]:
        """Returns the newest jobs of each tenant as they are now, newest first.

        Args:
            tenants: All that are watched; others are forgotten.
        """
        self._ids = {name: ids for name, ids in self._ids.items() if name in tenants}
        if not tenants:
            return {}
        await self._add_newer()
        for tenant in set(tenants) - self._ids.keys():
            page = await jobs_page(
                self._client.session, limit=self._limit, tenant=tenant
            )
            self._ids[tenant] = [info.id for info in page.jobs]
        names = [(tenant, one) for tenant, ids in self._ids.items() for one in ids]
        read = await records(self._client.session, [Place(0, one) for _, one in names])
        found: dict[str, list[JobInfo]] = {tenant: [] for tenant in tenants}
        for (tenant, _), (_, info) in zip(names, read, strict=True):
            if info is not None:
                found[tenant].append(info)
        return {tenant: tuple(infos) for tenant, infos in found.items()}

    async def _add_newer(self) -> None:
        newer: list[tuple[float, str]] = []
        (members,) = await self._client.session.read(("SMEMBERS", SHARDS))
        names = sorted(member.decode(errors="replace") for member in members)
        shards = [Keys.of_shard(name) for name in names if is_shard(name)]
        replies = await self._client.session.read_each(
            *(self._command(k) for k in shards)
        )
        for keys, flat in zip(shards, replies, strict=True):
            if isinstance(flat, ProtocolError) or not flat:
                continue
            newer += [
                (float(at), raw.decode(errors="backslashreplace"))
                for raw, at in zip(flat[::2], flat[1::2], strict=True)
            ]
            self._seen[keys.shard] = int(float(flat[1]))
        if self._ids:
            await self._share_out([one for _, one in sorted(newer, reverse=True)])

    def _command(self, keys: Keys) -> tuple[str | int, ...]:
        if not self._ids:  # nobody to look for: where to begin the next time
            return ("ZREVRANGE", keys.recent, 0, 0, "WITHSCORES")
        # Others of the same millisecond may have come since.
        oldest = self._seen.get(keys.shard, "-inf")
        return (
            *("ZREVRANGEBYSCORE", keys.recent, "+inf", oldest, "WITHSCORES"),
            *("LIMIT", 0, MOST_NEW),
        )

    async def _share_out(self, newer: list[str]) -> None:
        """Gives newer jobs to their tenants."""
        known = {one: JobId.parse(one) for one in newer if _is_id(one)}
        tenants = await self._client.session.read_each(
            *(("HGET", job.keys.job(one), "tenant") for one, job in known.items())
        )
        of: dict[str, list[str]] = {tenant: [] for tenant in self._ids}
        for one, raw in zip(known, tenants, strict=True):
            tenant = raw.decode(errors="replace") if isinstance(raw, bytes) else ""
            if tenant in of:
                of[tenant].append(one)
        for tenant, ids in of.items():
            # One that was known already keeps its first, newer place.
            merged = dict.fromkeys(ids + self._ids[tenant])
            self._ids[tenant] = list(merged)[: self._limit]


def _is_id(text: str) -> bool:
    try:
        JobId.parse(text)
    except UnknownJob:
        return False
    return True
