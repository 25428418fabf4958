"""Replies of Redis as needed here: what a stranger wrote spoils nothing."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ResponseError

from ..errors import TokenmillError

if TYPE_CHECKING:
    import redis.asyncio

_MOST: Final = 1 << 53
"""JSON carries whole numbers below it exactly."""
Command = tuple[str | bytes | int, ...]
Read = Callable[..., Awaitable[list[Any]]]
"""Sends commands in one round trip; where a key has a strange type, an exception
stands in the place of the reply."""


def pipelined(client: "redis.asyncio.Redis") -> Read:
    """Returns a `Read` over a plain client."""

    async def read(*commands: Command) -> list[Any]:
        pipe = client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception) and not is_strange(reply):
                raise reply
        return replies

    return read


def is_strange(reply: object) -> bool:
    """Whether a reply only says that a key is of another type than was expected."""
    if isinstance(reply, TokenmillError):
        return True
    return isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)


def whole(value: object) -> int:
    """Returns a count or a time; 0 for what is none, as an infinite score."""
    try:
        count = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return 0
    return count if abs(count) < _MOST else 0


def moment(value: object) -> int | None:
    """Returns a time in ms that a script may have written as a float; else None."""
    if not isinstance(value, bytes) or not value:
        return None
    try:
        return int(float(value))
    except (ValueError, OverflowError):
        return None


def pairs(reply: object) -> list[tuple[bytes, float]]:
    """Returns members and scores of a sorted set, as redis-py gives them."""
    if not isinstance(reply, list):
        return []
    if reply and not isinstance(reply[0], tuple):
        return list(zip(reply[::2], map(float, reply[1::2]), strict=True))
    return list(reply)


def rows(reply: object) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
    """Returns entries of a stream; deleted ones are left out."""
    if not isinstance(reply, list):
        return []
    return [(name, fields) for name, fields in reply if fields]


def text(value: object) -> str:
    """Returns bytes as text, whatever they are."""
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def ms_of(entry_id: object) -> int:
    """Returns the time in a stream's entry id."""
    return whole(text(entry_id).partition("-")[0])
