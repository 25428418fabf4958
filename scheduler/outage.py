"""Redis away, for one loop of the scheduler: what is logged and how long it waits."""

import asyncio
from typing import Final

import redis.asyncio
import redis.exceptions
import structlog

from ..shared.errors import RedisUnavailable
from ..shared.keys import Keys
from ..shared.outage import FIRST_WAIT_S, LONGEST_WAIT_S, REDIS_ERRORS, Backoff
from ..shared.outage import Outage as Connection
from ..shared.redis import translate
from ..shared.server_check import require_usable

__all__ = ["REDIS_ERRORS", "Outage", "require_redis", "restart_grace_s"]

START_S: Final = 10.0
"""Longest wait for the first answer of Redis: an address that is wrong is said soon."""
BLIP_S: Final = 1.0
"""In a shorter outage no lease ends: each is renewed thrice in its length."""
GRACE_S: Final = LONGEST_WAIT_S + 0.5
"""A worker that tries again this late has reconnected."""
_log = structlog.get_logger(__name__)


async def require_redis(client: "redis.asyncio.Redis") -> None:
    """Makes sure that Redis answers before a process begins to wait for it for ever.

    Args:
        client: Redis. A server that is still loading its data answers.

    Raises:
        RedisUnavailable: No answer in `START_S`.
        RedisUnsuitable: It refuses us.
    """
    try:
        with translate():
            async with asyncio.timeout(START_S):
                await require_usable(client, serving=True)
    except RedisUnavailable as error:
        if isinstance(error.__cause__, TimeoutError) and not str(error.__cause__):
            raise RedisUnavailable(
                f"Redis did not answer within {START_S:.0f} s; "
                "check that the server runs and that the URL is right"
            ) from error
        raise


async def restart_grace_s(client: "redis.asyncio.Redis", keys: Keys) -> float:
    """Returns the seconds to leave leases alone since the server has only just started.

    A scheduler that started with it knows of no outage, yet leases may have ended in
    one. Without any lease there is nothing to wait for.

    Args:
        client: Redis.
        keys: The shard's names.
    """
    pipe = client.pipeline(transaction=False)
    pipe.info("server")
    pipe.zcard(keys.lease)
    info, leases = await pipe.execute(raise_on_error=False)
    for reply in (info, leases):
        if isinstance(reply, redis.exceptions.ResponseError):
            _log.debug("uptime_unknown", shard=keys.shard, error=str(reply))
            return 0.0
        if isinstance(reply, Exception):
            raise reply
    # Whole seconds, rounded down.
    uptime_s = float(info.get("uptime_in_seconds", GRACE_S))
    return max(0.0, GRACE_S + 1.0 - uptime_s) if leases else 0.0


class Outage:
    """How long Redis has been away, for one shard.

    Args:
        shard: For the log.
    """

    def __init__(self, shard: str) -> None:
        self._connection = Connection(shard=shard)
        self._backoff = Backoff(floor_s=FIRST_WAIT_S)

    async def wait(self, error: BaseException) -> None:
        """Notes a failure and waits before the next try: full jitter, doubling."""
        self._connection.failed(None, error)
        await self._backoff.wait()

    def grace_s(self) -> float:
        """Seconds to leave leases alone after an outage that some may have ended in.

        Workers that live renew them as soon as they have reconnected.
        """
        return GRACE_S if self._connection.seconds > BLIP_S else 0.0

    def over(self) -> None:
        """Notes that Redis answers."""
        self._connection.recovered()
        self._backoff.reset()
