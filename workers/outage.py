"""Which errors of Redis are an outage, which an answer; calls that outlast one."""

from collections.abc import Awaitable, Callable
from typing import Final

import redis.exceptions

from ..shared.errors import ProtocolError, RedisUnsuitable
from ..shared.outage import REDIS_ERRORS, Backoff, Outage
from ..shared.redis import server_says

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


def is_refusal(error: BaseException) -> bool:
    """Whether Redis understood a call and will refuse it however often it comes."""
    if isinstance(error, ProtocolError):
        return True
    cause = error.__cause__ if isinstance(error, RedisUnsuitable) else error
    if not isinstance(cause, redis.exceptions.ResponseError):
        return False
    text = str(cause)
    passes = isinstance(cause, _PASSING) or text.startswith(_PASSING_PREFIXES)
    return not passes and server_says(text) is None


async def repeated(
    call: Callable[[], Awaitable[None]], where: str, outage: Outage
) -> bool:
    """Repeats a call until Redis has answered; False when it refuses for good.

    Args:
        call: Changes nothing when Redis has done it before.
        where: For the log.
        outage: Shared state of the connection.
    """
    backoff = Backoff()
    while True:
        try:
            await call()
        except (*REDIS_ERRORS, ProtocolError) as error:
            if is_refusal(error):
                return False
            outage.failed(where, error)
            await backoff.wait()
        else:
            outage.recovered()
            return True
