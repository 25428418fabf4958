"""The clock of Redis: asked for, or as seen from here without asking each time."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import redis.asyncio


async def redis_ms(client: "redis.asyncio.Redis") -> int:
    """Returns the time of Redis in milliseconds; one round trip."""
    return time_ms(await client.time())


def time_ms(reply: Sequence[int | bytes]) -> int:
    """Returns a reply to `TIME`, seconds and microseconds, in milliseconds."""
    seconds, microseconds = reply
    return int(seconds) * 1000 + int(microseconds) // 1000


class RedisClock:
    """Redis time derived from the local monotonic clock and the last observation.

    Wall clocks of hosts differ and jump; leases and timings are by Redis alone.

    Args:
        monotonic: Local clock in seconds; replaced by tests.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset_ms = time.time() * 1000.0 - monotonic() * 1000.0

    def observe(self, redis_ms: float) -> None:
        """Sets the clock by a reading that has just arrived from Redis."""
        self._offset_ms = redis_ms - self._monotonic() * 1000.0

    def now_ms(self) -> int:
        """Returns the present Redis time in milliseconds."""
        return int(self._monotonic() * 1000.0 + self._offset_ms)
