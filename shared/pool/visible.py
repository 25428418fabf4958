"""What `tokenmill doctor` says of a part that its Redis user may not look at."""

from collections.abc import Awaitable

from redis.exceptions import NoPermissionError, RedisError

from ..errors import TokenmillError
from ..redis import Finding


async def if_visible(name: str, look: Awaitable[list[Finding]]) -> list[Finding]:
    """Returns what was found; of what the user may not read, that it may not.

    Args:
        name: Of the part.
        look: Looks at it.

    Raises:
        RedisError: Anything else is wrong.
        TokenmillError: Anything else is wrong, in our words.
    """
    try:
        return await look
    except (RedisError, TokenmillError) as error:
        if not is_refused(error):
            raise
        return [hidden(name)]


def is_refused(reply: object) -> bool:
    """Whether a reply, or an error made of one, says that the user may not do that."""
    if isinstance(reply, TokenmillError):
        reply = reply.__cause__
    return isinstance(reply, NoPermissionError)


def hidden(name: str) -> Finding:
    """Says that a part cannot be seen."""
    return Finding(
        "info",
        name,
        "not visible to this Redis user; the URL of another role shows it",
    )
