"""Redis away: one log line when it goes, one when it is back, and jittered waits."""

import asyncio
import random
import time
from typing import Final

import redis.exceptions
import structlog

from .errors import RedisUnavailable, RedisUnsuitable
from .metrics.catalog import REDIS_AWAY, REDIS_OUTAGES

REDIS_ERRORS: Final = (
    redis.exceptions.RedisError,
    RedisUnavailable,
    RedisUnsuitable,
    OSError,
    TimeoutError,
)
"""What a call to Redis raises when the server is away, loading, full or read-only."""
FIRST_WAIT_S: Final = 0.05
LONGEST_WAIT_S: Final = 2.0
"""Well under a lease, so that work goes on soon after the server is back."""


class Outage:
    """Whether Redis answers, as seen by all who share one connection.

    Args:
        **context: Goes into both log lines.
    """

    def __init__(self, **context: str) -> None:
        self._log = structlog.get_logger(__name__, **context)
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """How long it has lasted; 0 when there is none."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def failed(self, where: str | None, error: BaseException) -> None:
        """Notes a failed call; only the first of an outage is logged.

        Args:
            where: Which of several loops it was, if there are several.
            error: What the call raised.
        """
        if self._since is None:
            self._since = time.monotonic()
            REDIS_AWAY.add(by=1)
            during = {} if where is None else {"during": where}
            self._log.warning(
                "redis_unreachable", **during, error=str(error) or repr(error)
            )

    def recovered(self) -> None:
        """Notes a successful call."""
        if self._since is not None:
            seconds = time.monotonic() - self._since
            self._since = None
            REDIS_AWAY.add(by=-1)
            REDIS_OUTAGES.add()
            self._log.warning("redis_back", after_s=round(seconds, 2))


class Backoff:
    """Waiting times that double up to a bound, each drawn with full jitter.

    Args:
        first_s: Bound of the first, in seconds.
        longest_s: Bound of all.
        floor_s: Least; it keeps an unlucky draw from becoming a busy loop. None is
            half of `first_s`.
    """

    def __init__(
        self,
        first_s: float = FIRST_WAIT_S,
        longest_s: float = LONGEST_WAIT_S,
        floor_s: float | None = None,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._floor_s = first_s / 2 if floor_s is None else floor_s
        self._tries = 0

    def reset(self) -> None:
        """Starts from the first waiting time again."""
        self._tries = 0

    def next_s(self) -> float:
        """Returns the next waiting time in seconds."""
        bound = min(self._longest_s, self._first_s * 2.0 ** min(self._tries, 30))
        self._tries += 1
        return max(self._floor_s, random.uniform(0, bound))  # noqa: S311

    async def wait(self) -> None:
        """Waits out the next time."""
        await asyncio.sleep(self.next_s())
