"""Terminal events of all shards, read once and handed to whoever acts on them.

The cursor of each shard stands in Redis and moves after the handlers have returned, so
an event may be handled twice (a crash between, or two janitors) and is never skipped;
handlers are idempotent. The stream is trimmed: what a handler must not miss, it finds
by a sweep of its own as well.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, cast

import msgspec
import redis.asyncio
import structlog

from ..shared.bulk.keys import EVENTS
from ..shared.keys import SHARDS, Keys
from ..shared.script_runner import text
from .housekeeping import shards_of
from .outage import REDIS_ERRORS

PAUSE_S: Final = 0.2
"""At most five reads a second, whatever the load: each takes up to `COUNT` events."""
COUNT: Final = 1000
"""Events of each shard in one read."""
BLOCK_MS: Final = 2000
"""How long an idle read waits for the first event; it learns of new shards after."""
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
    """Reads the `done` streams, for those who act on bulk jobs and on webhooks.

    Args:
        client: Redis; replies are bytes.
        handlers: Called in turn with what was read.
        bell: A further stream; a new entry ends the wait, and is not looked at.
        takes_all: Whether some handler wants every event of a shard; of most jobs
            nobody does.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        handlers: Sequence[Handler],
        *,
        bell: str,
        takes_all: Callable[[Keys], bool] = lambda _keys: False,
    ) -> None:
        self._client = client
        self._handlers = handlers
        self._takes_all = takes_all
        self._bell = bell
        self._rung = START
        self._members: set[bytes] = set()
        self._shards: dict[str, Keys] = {}

    async def step(self) -> int:
        """Reads once and has the events handled.

        Returns:
            How many events there were, of any job.

        Raises:
            RedisError: Redis did not answer.
        """
        cursors = await self._look()
        found = await self._client.xread(
            {
                self._bell: self._rung,
                **{
                    keys.done: cursors.get(keys.shard, START)
                    for keys in self._shards.values()
                },
            },
            count=COUNT,
            block=BLOCK_MS,
        )
        total = 0
        for name, rows in found:
            if text(name) == self._bell:
                self._rung = text(rows[-1][0])
                continue
            keys = self._shards[text(name)]
            every = self._takes_all(keys)
            concern = [row for _, row in rows if every or _concerns(row)]
            await self._handle(keys, [_event(fields) for fields in concern])
            await cast(
                "object",
                self._client.hset(EVENTS, keys.shard, text(rows[-1][0])),  # type: ignore[misc]
            )
            total += len(rows)
        return total

    async def _look(self) -> dict[str, str]:
        """Learns which shards there are; returns the cursors of those begun."""
        pipe = self._client.pipeline(transaction=False)
        pipe.smembers(SHARDS)
        pipe.hgetall(EVENTS)
        members, cursors = cast(
            "tuple[set[bytes], dict[bytes, bytes]]", await pipe.execute()
        )
        if members != self._members:
            self._members = members
            self._shards = {keys.done: keys for keys in shards_of(members)}
        return {text(shard): text(last) for shard, last in cursors.items()}

    async def _handle(self, keys: Keys, events: Sequence[DoneEvent]) -> None:
        if not events:
            return
        for handler in self._handlers:
            try:
                await handler(keys, events)
            except REDIS_ERRORS:
                raise  # the same events are read again once Redis is back
            except Exception:  # noqa: BLE001 - one handler must not stop the others
                _log.exception(
                    "events_not_handled", shard=keys.shard, events=len(events)
                )


def _concerns(fields: Mapping[bytes, bytes]) -> bool:
    """Whether anyone acts on an event: of most jobs, nobody here does."""
    return fields.get(b"class") == b"bulk" or b"webhook" in fields


def _event(fields: Mapping[bytes, bytes]) -> DoneEvent:
    return DoneEvent(
        id=text(fields.get(b"id")),
        state=text(fields.get(b"state")),
        job_class=text(fields.get(b"class")),
        tenant=text(fields.get(b"tenant")),
        has_webhook=fields.get(b"webhook") == b"1",
    )
