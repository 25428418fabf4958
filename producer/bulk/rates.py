"""How fast a run goes, and when it will be done."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

SPAN_S: Final = 30.0
"""Over which the rate of tokens is taken: jobs end in bursts."""


class Rates:
    """Rates of one process.

    Args:
        now: A clock in seconds; replaced by tests.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._before = 0
        self._samples: deque[tuple[float, int]] = deque()

    def begin(self, settled: int, tokens: int) -> None:
        """Starts the clock.

        Args:
            settled: Lines that earlier processes wrote.
            tokens: Of jobs that had ended before.
        """
        self._began, self._before = self._now(), settled
        self._samples.clear()
        self._samples.append((self._began, tokens))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._now() - self._began

    def tokens_per_s(self, tokens: int) -> float:
        """Returns the rate over the last half minute.

        Args:
            tokens: Counted since the start, now.
        """
        now = self._now()
        self._samples.append((now, tokens))
        while len(self._samples) > 2 and now - self._samples[1][0] >= SPAN_S:
            self._samples.popleft()
        first_at, first = self._samples[0]
        return (tokens - first) / (now - first_at) if now > first_at else 0.0

    def eta_s(self, settled: int, total: int | None) -> float | None:
        """Returns the seconds that are left at the rate so far, where that is known.

        Args:
            settled: Lines that are written.
            total: Lines in all.
        """
        new = settled - self._before
        if total is None or new <= 0:
            return None
        return max(total - settled, 0) * self.elapsed_s / new
