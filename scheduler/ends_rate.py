"""How fast a shard ends jobs while some wait: what a full queue tells those it refuses.

How fast jobs leave the queue says little of slots that hold long ones: many leave at
once, and then none for a minute. What has ended is the steadier measure.
"""

import asyncio
from typing import Final, cast

import redis.asyncio

from ..shared.clock import time_ms
from ..shared.keys import Keys
from ..shared.lifecycle import State
from ..shared.shadow_keys import SHADOW_TENANT

EVERY_S: Final = 2.0
WINDOW_MS: Final = 120_000
"""Ends of this time count, of which something waited all the while."""
MOST_ENDS: Final = 200
"""Newest ends that are looked at: of a quick shard they lie within moments."""
_SERVED: Final = frozenset({State.SUCCEEDED.encode(), State.FAILED.encode()})
"""Ends that made room on a worker; what is cancelled or expires may never have run."""

_SHADOW: Final = SHADOW_TENANT.encode()
"""Owns copies of jobs, which take room from nobody."""


class EndsRate:
    """Measures the ends of one shard, and writes their rate for `enqueue` to read.

    Args:
        client: Redis.
        keys: The shard's names.
    """

    def __init__(self, client: "redis.asyncio.Redis", keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._waits_since_ms: int | None = None

    async def run(self) -> None:
        """Measures until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(EVERY_S)

    async def step(self) -> None:
        """Measures once; while nothing waits there is nothing to measure."""
        pipe = self._client.pipeline(transaction=False)
        pipe.time()
        pipe.hget(self._keys.load, "jobs")
        time, waiting = await pipe.execute()
        now_ms = time_ms(time)
        if waiting is None:
            self._waits_since_ms = None
            return
        if self._waits_since_ms is None:
            self._waits_since_ms = now_ms
        since_ms = max(self._waits_since_ms, now_ms - WINDOW_MS)
        rows = cast(
            "list[tuple[bytes, dict[bytes, bytes]]]",
            await self._client.xrevrange(
                self._keys.done, "+", str(since_ms), count=MOST_ENDS
            ),
        )
        if len(rows) == MOST_ENDS:
            since_ms = int(rows[-1][0].partition(b"-")[0])
        per_s = rate(sum(map(_is_served, rows)), now_ms - since_ms)
        fields = {"rate_ends": f"{per_s:.6g}", "rate_ends_ms": str(now_ms)}
        await cast(
            "object",
            self._client.hset(self._keys.load, mapping=fields),  # type: ignore[misc]
        )


def rate(num_ends: int, elapsed_ms: int) -> float:
    """Returns the ends per second.

    Args:
        num_ends: In that time. Where there was none yet, there was none faster than one
            in as much time.
        elapsed_ms: During which something waited.
    """
    return 1000 * max(num_ends, 1) / max(elapsed_ms, 1)


def _is_served(row: tuple[bytes, dict[bytes, bytes]]) -> bool:
    _, fields = row
    return fields.get(b"state") in _SERVED and fields.get(b"tenant") != _SHADOW
