"""Terminal events of all shards, read once and handed to whoever acts on them.

The cursor of each shard stands in Redis and moves after the handlers have returned, so
an event may be handled twice (a crash between, or two janitors) and is never skipped;
handlers are idempotent. The stream is trimmed: what a handler must not miss, it finds
by a sweep of its own as well.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, cast

import msgspec
import redis.asyncio
import structlog

from ..shared.bulk.keys import EVENTS
from ..shared.keys import Keys
from ..shared.script_runner import text
from .housekeeping import shards
from .outage import REDIS_ERRORS

PAUSE_S: Final = 0.2
"""At most five reads a second, whatever the load: each takes up to `COUNT` events."""
COUNT: Final = 1000
"""Events of each shard in one read."""
BLOCK_MS: Final = 500
"""How long an idle read waits for the first event."""
SHARDS_S: Final = 1.0
"""How often it is asked which shards there are."""
START: Final = "0-0"
"""Where a shard is begun that has no cursor: events before ours do no harm."""
_log = structlog.get_logger(__name__)


class DoneEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One job has ended."""

    id: str
    state: str
    job_class: str = ""
    tenant: str = ""
    has_webhook: bool = False


Handler = Callable[[Keys, Sequence[DoneEvent]], Awaitable[None]]
"""Takes the events of one shard, in their order; may be given some again."""


class DoneReader:
    """Reads the `done` streams.

    Args:
        client: Redis; replies are bytes.
        handlers: Called in turn with what was read.
    """

    def __init__(
        self, client: "redis.asyncio.Redis", handlers: Sequence[Handler]
    ) -> None:
        self._client = client
        self._handlers = handlers
        self._shards: dict[str, Keys] = {}
        self._shards_at = -SHARDS_S

    async def step(self) -> int:
        """Reads once and has the events handled.

        Returns:
            How many there were.

        Raises:
            RedisError: Redis did not answer.
        """
        await self._look_for_shards()
        if not self._shards:
            await asyncio.sleep(BLOCK_MS / 1000)
            return 0
        cursors = await self._cursors()
        found = await self._client.xread(
            {
                keys.done: cursors.get(keys.shard, START)
                for keys in self._shards.values()
            },
            count=COUNT,
            block=BLOCK_MS,
        )
        total = 0
        for name, rows in found:
            keys = self._shards[text(name)]
            await self._handle(keys, [_event(fields) for _, fields in rows])
            await cast(
                "object",
                self._client.hset(EVENTS, keys.shard, text(rows[-1][0])),  # type: ignore[misc]
            )
            total += len(rows)
        return total

    async def _look_for_shards(self) -> None:
        now = time.monotonic()
        if not self._shards or now - self._shards_at >= SHARDS_S:
            self._shards = {keys.done: keys for keys in await shards(self._client)}
            self._shards_at = now

    async def _cursors(self) -> dict[str, str]:
        raw = cast(
            "dict[bytes, bytes]",
            await cast("object", self._client.hgetall(EVENTS)),  # type: ignore[misc]
        )
        return {text(shard): text(last) for shard, last in raw.items()}

    async def _handle(self, keys: Keys, events: Sequence[DoneEvent]) -> None:
        for handler in self._handlers:
            try:
                await handler(keys, events)
            except REDIS_ERRORS:
                raise  # the same events are read again once Redis is back
            except Exception:  # noqa: BLE001 - one handler must not stop the others
                _log.exception(
                    "events_not_handled", shard=keys.shard, events=len(events)
                )


def _event(fields: dict[bytes, bytes]) -> DoneEvent:
    return DoneEvent(
        id=text(fields.get(b"id")),
        state=text(fields.get(b"state")),
        job_class=text(fields.get(b"class")),
        tenant=text(fields.get(b"tenant")),
        has_webhook=fields.get(b"webhook") == b"1",
    )
