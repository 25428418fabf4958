"""The newest jobs in views of the pool, looked for once for all who ask.

Among many jobs of others, finding a tenant's newest takes thousands of reads. That is
done when it first asks; until it has not asked for a while, a look costs what has come
since, once for all tenants, and the few records that are shown.
"""

import asyncio
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from ..info import JobInfo
from ..listing import recent_jobs
from ..newest_jobs import NewestJobs

if TYPE_CHECKING:
    from .context import Gateway

MOST: Final = 12
"""Jobs of a tenant, or of all, in a view."""
FRESH_S: Final = 1.0
"""A look serves those who ask within this time of it."""
FORGET_S: Final = 30.0
"""A tenant that did not ask for so long is looked for anew."""
MOST_TENANTS: Final = 64
"""Tenants that are kept in mind: those that asked last."""


class RecentJobs:
    """Knows the newest jobs of those who ask for them.

    Args:
        owner: The gateway.
    """

    def __init__(self, owner: "Gateway") -> None:
        self._owner = owner
        self._newest = NewestJobs(owner.client, MOST)
        self._asked: dict[str | None, float] = {}
        """Tenant, None for all -> when it asked last, the latest at the end."""
        self._found: dict[str | None, tuple[JobInfo, ...]] = {}
        self._looked_at = -math.inf
        self._turn = asyncio.Lock()

    async def of(
        self, tenants: Collection[str | None]
    ) -> Mapping[str | None, tuple[JobInfo, ...]]:
        """Returns the newest jobs of each tenant, newest first.

        Args:
            tenants: None among them stands for all.

        Raises:
            RedisUnavailable: Redis did not answer.
        """
        async with self._turn:
            now = asyncio.get_running_loop().time()
            self._note(tenants, now)
            is_fresh = now - self._looked_at <= FRESH_S
            if now - self._looked_at > FORGET_S:
                self._newest = NewestJobs(self._owner.client, MOST)
            if not (is_fresh and self._found.keys() >= set(tenants)):
                self._found = await self._look()
                self._looked_at = now
            return {tenant: self._found[tenant] for tenant in tenants}

    def _note(self, tenants: Collection[str | None], now: float) -> None:
        for tenant in tenants:
            self._asked.pop(tenant, None)
            self._asked[tenant] = now
        most = max(MOST_TENANTS, len(tenants))
        kept = list(self._asked.items())[-most:]
        self._asked = {one: at for one, at in kept if now - at <= FORGET_S}

    async def _look(self) -> dict[str | None, tuple[JobInfo, ...]]:
        named = {tenant for tenant in self._asked if tenant is not None}
        found: dict[str | None, tuple[JobInfo, ...]] = {}
        found.update(await self._newest.look(named))
        if None in self._asked:
            session = self._owner.client.session
            found[None] = tuple(await recent_jobs(session, MOST, None))
        return found
