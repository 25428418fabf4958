"""Shadow traffic: jobs that have ended run once more on a version that is tried.

A copy is a bulk job of lowest priority, pinned to the version and owned by a tenant of
its own; nobody is told of it. When it has ended, its output and its times are compared
with those of the job that it was made from.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, cast

import redis.asyncio
import structlog

from ..shared.keys import SHARDS, Keys
from ..shared.routes import SLOTS, Route
from ..shared.script_runner import count_of, text
from ..shared.shadow_keys import SHADOW_TENANT, shadow_key
from ..shared.shadow_report import KEEP_S
from ..shared.version_keys import versions_key
from ..shared.version_records import ROUTE, decode_route
from .events import DoneEvent
from .outage import REDIS_ERRORS
from .shadow_compare import compare
from .shadow_copy import Copier

LOOK_EVERY_S: Final = 1.0
"""Between two looks at what is to be copied."""
PER_S: Final = 20.0
"""Copies that one janitor makes in a second at most."""
BURST: Final = 40.0
MOST_WAITING: Final = 64
"""Copies that wait in a shard: beyond that jobs are passed over."""
_log = structlog.get_logger(__name__)


class Shadow:
    """Copies and compares; a handler of `events.DoneReader`.

    Args:
        client: Redis; replies are bytes.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client
        self._copier = Copier(client)
        self._routes: dict[str, Route] = {}
        """Models of which anything is copied."""
        self._allowance = BURST
        self._allowed_at = 0.0

    async def run(self) -> None:
        """Learns what is to be copied, until cancelled."""
        while True:
            try:
                await self.look()
            except REDIS_ERRORS as error:
                _log.debug("shadow_routes_not_read", error=str(error))
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Reads the routes of all models once."""
        members = cast("set[bytes]", await self._client.smembers(SHARDS))  # type: ignore[misc]
        models = sorted({text(member).rpartition(":")[0] for member in members})
        pipe = self._client.pipeline(transaction=False)
        for model in models:
            pipe.hget(versions_key(model), ROUTE)
        rows = await pipe.execute(raise_on_error=False) if models else []
        routes: dict[str, Route] = {}
        for model, raw in zip(models, rows, strict=True):
            if not isinstance(raw, bytes):
                continue
            try:
                route = decode_route(raw, versions_key(model))
            except Exception as error:  # noqa: BLE001 - of one model alone
                _log.error("shadow_route_unusable", model=model, error=str(error))
                continue
            if route.shadow:
                routes[model] = route
        self._routes = routes

    def wants(self, keys: Keys) -> bool:
        """Whether it acts on every event of a shard, not on its own copies alone."""
        return keys.model in self._routes

    async def on_done(self, keys: Keys, events: Sequence[DoneEvent]) -> None:
        """Handles terminal events of a shard; may be given some again."""
        ended = [event for event in events if event.tenant == SHADOW_TENANT]
        for event in ended:
            await compare(self._client, keys, event)
        route = self._routes.get(keys.model)
        if route is None:
            return
        for version, percent in route.shadow.items():
            chosen = [event for event in events if _is_chosen(event, version, percent)]
            if chosen:
                await self._copy(keys, route, version, chosen)

    async def _copy(
        self, keys: Keys, route: Route, version: str, events: Sequence[DoneEvent]
    ) -> None:
        room = MOST_WAITING - await self._waiting(keys)
        fitting = events[: max(room, 0)]
        taken = fitting[: self._take_allowance(len(fitting))]
        made = await self._copier.copy(
            keys, route, version, [event.id for event in taken]
        )
        skipped = Counter(made.skipped)
        skipped["waiting"] += len(events) - len(fitting)
        skipped["rate"] += len(fitting) - len(taken)
        counts = {f"skipped:{reason}": number for reason, number in skipped.items()}
        await self._count(keys, version, {"copied": made.copied, **counts})

    async def _waiting(self, keys: Keys) -> int:
        raw = await self._client.hget(keys.load, f"tenant:{SHADOW_TENANT}:jobs")  # type: ignore[misc]
        return count_of(text(raw))

    def _take_allowance(self, wanted: int) -> int:
        now = asyncio.get_running_loop().time()
        gained = (now - self._allowed_at) * PER_S
        self._allowance = min(BURST, self._allowance + gained)
        self._allowed_at = now
        taken = min(wanted, int(self._allowance))
        self._allowance -= taken
        return taken

    async def _count(self, keys: Keys, version: str, counts: Mapping[str, int]) -> None:
        key = shadow_key(keys.model, version)
        pipe = self._client.pipeline(transaction=False)
        for name, number in counts.items():
            if number:
                pipe.hincrby(key, name, number)
        pipe.expire(key, KEEP_S)
        await pipe.execute()


def _is_chosen(event: DoneEvent, version: str, percent: float) -> bool:
    """The same answer however often an event comes, and another for each version."""
    if event.state != "succeeded" or event.tenant == SHADOW_TENANT:
        return False
    slot = zlib.crc32(f"{version}\0{event.id}".encode()) % SLOTS
    return slot < percent * SLOTS / 100.0
