"""Redis away: one log line when it goes, one when it is back, jittered waits."""

import asyncio
import random
import time
from typing import Final

import redis.exceptions
import structlog

from ..shared.errors import RedisUnavailable, RedisUnsuitable

REDIS_ERRORS: Final = (
    redis.exceptions.RedisError,
    RedisUnavailable,
    RedisUnsuitable,
    OSError,
    TimeoutError,
)
"""What a call to Redis raises while the server is away or refuses."""
FIRST_WAIT_S: Final = 0.05
LONGEST_WAIT_S: Final = 2.0
_log = structlog.get_logger(__name__)


class Outage:
    """How long Redis has been away, for one shard.

    Args:
        shard: For the log.
    """

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._since: float | None = None
        self._tries = 0

    async def wait(self, error: BaseException) -> None:
        """Notes a failure and waits before the next try: full jitter, doubling."""
        if self._since is None:
            self._since = time.monotonic()
            _log.warning(
                "redis_unreachable", shard=self._shard, error=str(error) or repr(error)
            )
        bound = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._tries, 10))
        self._tries += 1
        # A floor keeps an unlucky draw from becoming a busy loop.
        await asyncio.sleep(max(FIRST_WAIT_S, random.uniform(0, bound)))  # noqa: S311

    def over(self) -> None:
        """Notes that Redis answers."""
        if self._since is not None:
            away_s = round(time.monotonic() - self._since, 2)
            _log.warning("redis_back", shard=self._shard, after_s=away_s)
        self._since, self._tries = None, 0
