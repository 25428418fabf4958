"""The clock of Redis and the rate of arrivals, without asking for each reading."""

import math
import time
from collections.abc import Callable
from typing import Final

from ..shared import clock

RATE_WINDOW_S: Final = 1.0
"""Arrivals are forgotten with this time constant."""


class RedisClock:
    """The clock of Redis, set by replies of TIME.

    Args:
        monotonic: Local clock in seconds; replaced by tests.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock.RedisClock(monotonic)

    def observe(self, seconds: int, microseconds: int) -> None:
        """Sets the clock by a reply of TIME that has just arrived."""
        self._clock.observe(seconds * 1000.0 + microseconds / 1000.0)

    def now_ms(self) -> int:
        """Returns the present Redis time in milliseconds."""
        return self._clock.now_ms()


class ArrivalRate:
    """Arrivals per second, exponentially forgotten.

    Args:
        monotonic: Local clock in seconds; replaced by tests.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._count = 0.0
        self._at = monotonic()

    def add(self, count: int) -> None:
        """Notes that many arrivals now."""
        self._count, self._at = self._decayed() + count, self._monotonic()

    def per_second(self) -> float:
        """Returns the present rate."""
        return self._decayed() / RATE_WINDOW_S

    def _decayed(self) -> float:
        age = max(self._monotonic() - self._at, 0.0)
        return self._count * math.exp(-age / RATE_WINDOW_S)
