"""The store of a run as its driver calls it: patiently, through outages of Redis."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec.structs import replace

from ...shared.bulk.messages import FeedStatus, Item, Outcome, RunSpec, RunState
from ...shared.bulk.store import KEEP_MS, RunStore, orchestrator_alive
from ...shared.errors import RedisUnavailable, UnknownRun

if TYPE_CHECKING:
    from ...shared.bulk.messages import RunView
    from ..session import Session

T = TypeVar("T")
_LEAVE_S: Final = 1.0
_log: Final = logging.getLogger("tokenmill.producer")


class StoreCalls:
    """Every call is repeated while Redis does not answer, up to the client's patience.

    A run of which Redis knows nothing any more is begun again: its items are fed anew,
    and what had run finds its results by the ids of its jobs while they are kept.

    Args:
        session: The client's connections.
        run_id: The run.
        spec: What it is to do.
        keep_ms: How long everything of the run stays after it was last touched.
    """

    def __init__(
        self,
        session: "Session",
        run_id: str,
        spec: RunSpec,
        *,
        keep_ms: int = KEEP_MS,
    ) -> None:
        self._session = session
        self._spec = spec
        self._store = RunStore(session.redis, run_id, keep_ms=keep_ms)
        self._away_since: float | None = None
        self._is_new = False
        """Redis had no record of the run when this process came to it, or lost it."""
        self.losses = 0
        """Times that Redis was away or had forgotten the run: then what was fed or
        acknowledged last may be lost."""

    @property
    def away_s(self) -> float | None:
        """How long Redis has not answered, or None while it does."""
        since = self._away_since
        return None if since is None else time.monotonic() - since

    async def create(self) -> bool:
        """Records the run; returns False when it was there before."""
        is_new = await self._patiently(lambda: self._store.create(self._spec))
        self._is_new = self._is_new or is_new
        return is_new

    async def feed(self, items: Sequence[Item]) -> list[FeedStatus]:
        """Gives the run items."""

        def feed() -> Awaitable[list[FeedStatus]]:
            # A record that is new has counted none of what these replace.
            if not self._is_new:
                return self._store.feed(items)
            return self._store.feed([replace(item, replaces=None) for item in items])

        return await self._known(feed)

    async def wait(
        self, after: str, timeout_s: float, count: int
    ) -> list[tuple[str, Outcome]]:
        """Returns outcomes after one seen, waiting for the first."""
        return await self._patiently(
            lambda: self._store.wait(after, timeout_s=timeout_s, count=count)
        )

    async def ack(self, seqs: Sequence[int]) -> None:
        """Takes outcomes out of Redis."""
        if seqs:
            await self._patiently(lambda: self._store.ack(seqs))

    async def set_total(self) -> None:
        """Says that all items were fed.

        Of a run that Redis has forgotten it is not true: then it counts as a loss,
        after which the driver feeds its items again and says it anew.
        """
        try:
            await self._patiently(self._store.set_total)
        except UnknownRun:
            await self._begin_again()

    async def beat(self) -> RunState:
        """Says that the driver lives; returns the run's state."""
        return await self._known(self._store.beat)

    async def set_refused(self, count: int) -> None:
        """Says how many lines of the input could not be items."""
        await self._known(lambda: self._store.set_refused(count))

    async def leave(self) -> None:
        """Says that the driver ends; tried once, for it may be in a hurry."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._store.leave()
        except (RedisUnavailable, UnknownRun, TimeoutError) as error:
            _log.debug("leaving a run: %s", error or "no answer in time")

    async def reopen(self) -> RunState:
        """Lets a cancelled run go on."""
        return await self._known(self._store.reopen)

    async def view(self) -> "RunView":
        """Returns the run as it is."""
        return await self._known(self._store.view)

    async def is_orchestrated(self) -> bool:
        """Whether someone advances bulk runs in this pool."""
        redis = self._session.redis
        return await self._patiently(lambda: orchestrator_alive(redis))

    async def _known(self, call: Callable[[], Awaitable[T]]) -> T:
        """Calls; where Redis has forgotten the run, it is recorded and called again."""
        try:
            return await self._patiently(call)
        except UnknownRun:
            await self._begin_again()
            return await self._patiently(call)

    async def _begin_again(self) -> None:
        self.losses += 1
        await self.create()

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        attempts = 0

        def attempt() -> Awaitable[T]:
            nonlocal attempts
            attempts += 1
            if attempts > 1 and self._away_since is None:
                self._away_since = time.monotonic()
            return call()

        answer = await self._session.patiently(attempt)
        if attempts > 1:
            self._away_since = None
            self.losses += 1
        return answer
