"""The lease that makes one scheduler of a shard the active one."""

import asyncio
from collections.abc import Callable

import structlog

from ..shared.scripts import Scripts

_log = structlog.get_logger(__name__)


class LeadershipLost(Exception):
    """Another scheduler is active now: a signal between tasks, not an error."""


class Leadership:
    """Takes, keeps and gives back the lease of one shard.

    Args:
        scripts: The shard's.
        owner: This incarnation's random name.
        lease_ms: Length of the lease.
    """

    def __init__(self, scripts: Scripts, owner: str, lease_ms: int) -> None:
        self._scripts = scripts
        self._owner = owner
        self._lease_ms = lease_ms

    async def acquire(self) -> int | None:
        """Returns the fence number, or None while another scheduler is active."""
        return await self._scripts.acquire_scheduler(self._owner, self._lease_ms)

    async def wait(self, answered: Callable[[], None]) -> int:
        """Waits as a standby until this scheduler is the active one.

        Args:
            answered: Called whenever Redis has said that another one is.
        """
        waiting = False
        while True:
            fence = await self.acquire()
            if fence is not None:
                return fence
            answered()
            if not waiting:
                _log.info("standby", shard=self._scripts.keys.shard)
                waiting = True
            await asyncio.sleep(self._lease_ms / 4000)

    async def keep(self, fence: int) -> None:
        """Renews three times a lease until cancelled.

        Raises:
            LeadershipLost: Another scheduler took over.
        """
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            if await self.acquire() != fence:
                raise LeadershipLost

    async def release(self) -> None:
        """Gives the lease back, so that a standby need not wait it out."""
        await self._scripts.release_scheduler(self._owner)
