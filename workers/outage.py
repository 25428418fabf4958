"""Which errors of Redis are an outage, and which are an answer."""

from typing import Final

import redis.exceptions

from ..shared.errors import ProtocolError, RedisUnsuitable
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
