"""Whether the pool makes progress: jobs that wait beside free workers do not.

A process can live, answer and do nothing. What tells is that a job has waited for
long, a live worker group is at least half empty, and yet nothing was given to any
group of its shard for as long; or that no group lives at all. Nor does a pool get on
whose Redis refuses writes.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...shared.clock import time_ms
from ...shared.errors import TokenmillError
from ...shared.keys import SHARDS, Keys, is_shard, process_key
from ...shared.redis import translate
from ..pool_view import HEARTBEAT_MS

if TYPE_CHECKING:
    from .context import Gateway

ANSWER_S: Final = 2.0
"""Redis is given this long to answer; a prober waits no longer."""
_BELIEVED_S: Final = 1.0
"""Probers share an answer for this long."""
_MOST_GROUPS: Final = 64
_NO_KEY: Final = process_key("gateway:probe")
"""Never there; among the keys that a gateway may write."""
_FIELDS: Final = (
    "state",
    "alone",
    *("credit_running", "max_running"),
    *("credit_blocks", "total_blocks"),
)


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    problems: tuple[str, ...]
    """Why it is not well; none when it is."""
    num_groups: int
    """Live worker groups."""
    is_reachable: bool = True
    """Whether Redis answered."""


class _Group(msgspec.Struct, frozen=True):
    has_room: bool
    dispatched_ms: int
    """When it was last given a job, by the clock of Redis; 0: never, or long ago."""


class Progress:
    """Looks at the pool.

    Args:
        owner: The gateway.
    """

    def __init__(self, owner: "Gateway") -> None:
        self._owner = owner
        self._lock = asyncio.Lock()
        self._seen: Look | None = None
        self._seen_at = 0.0

    async def look(self) -> Look:
        """Returns how the pool is now, or was a moment ago."""
        async with self._lock:
            if self._seen is None or time.monotonic() - self._seen_at > _BELIEVED_S:
                self._seen = await self._look()
                self._seen_at = time.monotonic()
            return self._seen

    async def _look(self) -> Look:
        try:
            with translate():
                async with asyncio.timeout(ANSWER_S):
                    return await self._look_at_shards()
        except TokenmillError as error:
            return Look(problems=(str(error),), num_groups=0, is_reachable=False)

    async def _look_at_shards(self) -> Look:
        redis = self._owner.redis
        async with redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.smembers(SHARDS)
            # There is no such key, so nothing is written; but it has to be allowed.
            pipe.set(_NO_KEY, 1, xx=True, px=1)
            time_now, members, written = await pipe.execute(raise_on_error=False)
        for reply in (time_now, members):
            if isinstance(reply, Exception):
                raise reply
        now_ms = time_ms(time_now)
        names = (member.decode(errors="replace") for member in members)
        shards = [Keys.of_shard(name) for name in sorted(filter(is_shard, names))]
        found = await self._read([c for keys in shards for c in _first(keys, now_ms)])
        problems: list[str] = []
        if isinstance(written, Exception):
            problems.append(f"Redis refuses writes: {written}; nothing can be queued")
        num_groups = 0
        for index, keys in enumerate(shards):
            lanes, resume, scheduler, groups = found[index * 4 : index * 4 + 4]
            oldest_ms = _oldest(lanes, resume)
            live = [name.decode() for name in groups or ()]
            num_groups += len(live)
            stalled_ms = self._owner.config.gateway.stalled_s * 1000
            if oldest_ms is None or now_ms - oldest_ms < stalled_ms:
                continue
            if not live:
                waited_s = (now_ms - oldest_ms) / 1000
                problems.append(_unserved(keys, waited_s))
                continue
            if await self._has_moved(keys, live[:_MOST_GROUPS], now_ms - stalled_ms):
                continue
            age_s = (now_ms - oldest_ms) / 1000
            problems.append(_stall(keys, age_s, scheduler, now_ms))
        return Look(problems=tuple(problems), num_groups=num_groups)

    async def _has_moved(
        self, keys: Keys, live: Sequence[str], since_ms: float
    ) -> bool:
        """Whether jobs of a shard wait for a reason, or were given out of late."""
        commands: list[tuple[object, ...]] = []
        for name in live:
            commands.append(("HMGET", keys.group(name), *_FIELDS))
            commands.append(("XINFO STREAM", keys.work(name)))
        replies = await self._read(commands)
        groups = [
            _group(fields, stream)
            for fields, stream in zip(replies[::2], replies[1::2], strict=True)
        ]
        if not any(group.has_room for group in groups):
            return True
        return any(group.dispatched_ms >= since_ms for group in groups)

    async def _read(self, commands: Sequence[tuple[object, ...]]) -> list[Any]:
        if not commands:
            return []
        async with self._owner.redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            replies = await pipe.execute(raise_on_error=False)
        return [None if isinstance(one, Exception) else one for one in replies]


def _first(keys: Keys, now_ms: int) -> list[tuple[object, ...]]:
    return [
        ("ZRANGE", keys.lanes, 0, 0, "WITHSCORES"),
        ("XRANGE", keys.resume, "-", "+", "COUNT", 1),
        ("HGET", keys.scheduler, "until"),
        ("ZRANGEBYSCORE", keys.groups, now_ms - HEARTBEAT_MS, "+inf"),
    ]


def _oldest(lanes: Any, resume: Any) -> float | None:  # noqa: ANN401 - replies
    """Since when the oldest job waits, in milliseconds of Redis' clock."""
    times = [float(lanes[1])] if lanes else []
    times += [float(resume[0][0].partition(b"-")[0])] if resume else []
    return min(times, default=None)


def _group(fields: Any, stream: Any) -> _Group:  # noqa: ANN401 - replies
    state, alone, *sizes = fields or (None,) * len(_FIELDS)
    running, most_running, blocks, most_blocks = (
        int(size) if size is not None and size.lstrip(b"-").isdigit() else 0
        for size in sizes
    )
    # A job may need more than is left; what is half empty takes nearly any.
    half = 2 * running >= most_running > 0 and 2 * blocks >= most_blocks > 0
    last = (stream or {}).get("last-generated-id", b"0-0")
    return _Group(
        has_room=half and state == b"ready" and not alone,
        dispatched_ms=int(last.partition(b"-")[0]),
    )


def _unserved(keys: Keys, age_s: float) -> str:
    return (
        f"shard {keys.shard}: a job waits since {age_s:.0f} s and no worker that "
        "serves its model lives; start one, or cancel the job"
    )


def _stall(keys: Keys, age_s: float, scheduler: bytes | None, now_ms: int) -> str:
    active = scheduler is not None and scheduler.isdigit() and int(scheduler) > now_ms
    cure = (
        "its scheduler holds the lease and gives nothing out: look at its log"
        if active
        else "no scheduler is active: start one"
    )
    return (
        f"shard {keys.shard}: a job waits since {age_s:.0f} s while a worker has room "
        f"and none was given any; {cure}"
    )
