"""One log line when Redis goes away, one when it is back, and jittered back-off."""

import asyncio
import random
import time
from typing import Final

import redis.exceptions
import structlog

from ..shared.errors import ProtocolError, RedisUnavailable, RedisUnsuitable

REDIS_ERRORS: Final = (
    redis.exceptions.RedisError,
    RedisUnavailable,
    RedisUnsuitable,
    OSError,
    asyncio.TimeoutError,
)
"""What a call to Redis raises when the server is away, loading, full or read-only."""
_PASSING: Final = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoScriptError,
    redis.exceptions.AuthenticationError,
    redis.exceptions.NoPermissionError,
)
_PASSING_PREFIXES: Final = (
    *("BUSY", "MISCONF", "LOADING", "READONLY", "OOM", "NOREPLICAS"),
    *("CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "UNBLOCKED"),
)
"""Refusals that end by themselves or by an operator's hand."""
_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 2.0
"""Well under a lease, so that work goes on soon after the server is back."""


def is_refusal(error: BaseException) -> bool:
    """Whether Redis understood a call and will refuse it however often it comes."""
    if isinstance(error, ProtocolError):
        return True
    cause = error.__cause__ if isinstance(error, RedisUnsuitable) else error
    if not isinstance(cause, redis.exceptions.ResponseError):
        return False
    return not (isinstance(cause, _PASSING) or str(cause).startswith(_PASSING_PREFIXES))


class Outage:
    """The state of the connection, shared by all loops of one worker."""

    def __init__(self) -> None:
        self._log = structlog.get_logger()
        self._since: float | None = None

    @property
    def ongoing(self) -> bool:
        """Whether the last call to Redis failed."""
        return self._since is not None

    def failed(self, where: str, error: BaseException) -> None:
        """Notes a failed call; only the first of an outage is logged."""
        if self._since is None:
            self._since = time.monotonic()
            self._log.warning(
                "redis_unreachable", during=where, error=str(error) or repr(error)
            )

    def recovered(self) -> None:
        """Notes a successful call."""
        if self._since is not None:
            seconds = time.monotonic() - self._since
            self._since = None
            self._log.warning("redis_back", after_s=round(seconds, 2))


class Backoff:
    """Waiting times that double up to a bound, each drawn with full jitter."""

    def __init__(
        self, first_s: float = _FIRST_WAIT_S, longest_s: float = _LONGEST_WAIT_S
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._tries = 0

    def reset(self) -> None:
        """Starts from the first waiting time again."""
        self._tries = 0

    def next_s(self) -> float:
        """Returns the next waiting time in seconds."""
        bound = min(self._longest_s, self._first_s * 2.0 ** min(self._tries, 30))
        self._tries += 1
        # A floor keeps an unlucky draw from becoming a busy loop.
        return max(self._first_s / 2, random.uniform(0, bound))  # noqa: S311

    async def wait(self) -> None:
        """Waits out the next time."""
        await asyncio.sleep(self.next_s())
