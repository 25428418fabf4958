"""One look at the pool each second, for every browser that watches.

However many browsers there are, the pool is sampled once a second, and not at all
while nobody watches. Viewers who may see the same share the encoded bytes.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Final

import msgspec
import structlog

from ...shared.bulk.store import list_runs
from ...shared.errors import ProtocolError, TokenmillError
from ...shared.keys import BEYOND
from ...shared.watch.snapshot import HistorySample, PoolSnapshot
from ..info import JobInfo
from .admin_models import LiveView, RunRow
from .auth import Caller, Scope
from .context import Gateway
from .recent_jobs import RecentJobs
from .sse import event

EVERY_S: Final = 1.0
"""Between two looks."""
_HISTORY_TURNS: Final = 5
"""Looks between two reads of the history, whose samples come every ten seconds."""
_RECENT_TURNS: Final = 2
"""Looks between two reads of the newest jobs."""
_RUNS: Final = 50
_ALL: Final = None
"""Stands for every tenant."""
_log = structlog.get_logger(__name__)


class LiveViews:
    """Samples the pool while someone watches, and hands the views out.

    Args:
        owner: The gateway.
    """

    def __init__(self, owner: Gateway) -> None:
        self._owner = owner
        self._viewers: dict[asyncio.Event, str | None] = {}
        """A viewer's bell -> the tenant that it sees."""
        self._someone = asyncio.Event()
        self._current: dict[str | None, list[bytes]] = {}
        """Tenant -> events of the latest look."""
        self._recent: Mapping[str | None, tuple[JobInfo, ...]] = {}
        self._jobs = RecentJobs(owner)
        self._last_sample_ms = 0
        self.looks = 0
        """Taken so far: tests hold against it that viewers share them."""

    @property
    def viewers(self) -> int:
        """Browsers that watch now."""
        return len(self._viewers)

    @property
    def is_resting(self) -> bool:
        """Whether nothing is sampled, since nobody watches."""
        return not self._someone.is_set()

    async def watch(self, caller: Caller) -> AsyncGenerator[bytes, None]:
        """Yields events for one viewer, the first one at once.

        Args:
            caller: Decides what is in them.
        """
        tenant = tenant_seen(caller)
        bell = asyncio.Event()
        self._viewers[bell] = tenant
        self._someone.set()
        try:
            for chunk in self._current.get(tenant, ()):
                yield chunk
            while True:
                await bell.wait()
                bell.clear()
                for chunk in self._current.get(tenant, ()):
                    yield chunk
        finally:
            del self._viewers[bell]

    async def once(self, caller: Caller) -> LiveView:
        """Returns the pool at this moment, as a caller may see it."""
        tenant = tenant_seen(caller)
        recent = await self._jobs.of({tenant})
        pool = await self._owner.client.snapshot()
        return await view_of(self._owner, pool, tenant, recent[tenant])

    async def run(self) -> None:
        """Samples, for as long as the gateway runs."""
        while True:
            if not self._viewers:
                self._someone.clear()
                self._current, self._recent = {}, {}
                await self._someone.wait()
            begun = asyncio.get_running_loop().time()
            await self._look()
            for bell in self._viewers:
                bell.set()
            took = asyncio.get_running_loop().time() - begun
            await asyncio.sleep(max(EVERY_S - took, EVERY_S / 4))

    async def _look(self) -> None:
        tenants = set(self._viewers.values())
        self.looks += 1
        try:
            pool = await self._owner.client.snapshot()
            sample = await self._new_sample()
            if self.looks % _RECENT_TURNS == 1 or tenants - self._recent.keys():
                self._recent = await self._jobs.of(tenants)
            current: dict[str | None, list[bytes]] = {}
            for tenant in tenants:
                view = await view_of(self._owner, pool, tenant, self._recent[tenant])
                events = [event(msgspec.json.encode(view), kind="snapshot")]
                if sample is not None:
                    events.append(event(msgspec.json.encode(sample), kind="sample"))
                current[tenant] = events
            # No view is kept of a tenant that left: it would be the first when it
            # comes back.
            self._current = current
        except TokenmillError as error:
            _log.warning("live_view_failed", error=str(error))
            told = event(msgspec.json.encode({"message": str(error)}), kind="problem")
            self._current = {tenant: [told] for tenant in tenants}

    async def _new_sample(self) -> HistorySample | None:
        if self.looks % _HISTORY_TURNS != 1:
            return None
        samples = await self._owner.client.history(1)
        if not samples or samples[-1].at_ms <= self._last_sample_ms:
            return None
        self._last_sample_ms = samples[-1].at_ms
        return samples[-1]


def tenant_seen(caller: Caller) -> str | None:
    """Returns the only tenant that a caller may see, or None for every one."""
    return _ALL if Scope.ADMIN in caller.scopes else caller.tenant


async def view_of(
    owner: Gateway,
    pool: PoolSnapshot,
    tenant: str | None,
    recent: tuple[JobInfo, ...],
) -> LiveView:
    """Returns what one tenant, or an administrator, may see of a snapshot.

    Args:
        owner: The gateway.
        pool: Of this moment.
        tenant: None sees all.
        recent: Its newest jobs.
    """
    session = owner.client.session
    card = await session.patiently(session.view.pool)
    sees_all = tenant is None
    return LiveView(
        at_ms=pool.at_ms,
        buckets=(*map(str, card.all_buckets()), BEYOND),
        queues=pool.queues,
        waiting_jobs=pool.waiting_jobs,
        waiting_tokens=pool.waiting_tokens,
        classes=pool.classes,
        tenants=tuple(one for one in pool.tenants if sees_all or one.name == tenant),
        delayed=pool.delayed,
        running=pool.running,
        groups=pool.groups,
        schedulers=pool.schedulers,
        dead_letters=pool.dead_letters if sees_all else None,
        processes=pool.processes if sees_all else (),
        rates=pool.rates,
        latency=pool.latency,
        left_out=pool.left_out,
        recent=recent,
        runs=await run_rows(owner, tenant),
    )


async def run_rows(owner: Gateway, tenant: str | None) -> tuple[RunRow, ...]:
    """Returns the newest bulk runs of a tenant, or of all.

    Args:
        owner: The gateway.
        tenant: None sees all.
    """
    try:
        views = await list_runs(owner.redis, limit=_RUNS)
    except ProtocolError as error:
        # What a stranger wrote hides the list of runs, and nothing else.
        _log.warning("runs_not_listed", error=str(error))
        return ()
    return tuple(
        RunRow.of(view)
        for view in views
        if tenant is None or view.spec.tenant == tenant
    )
