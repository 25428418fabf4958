"""Several reads in one round trip, typed where redis-py's own types are not."""

from typing import TYPE_CHECKING, Any

from ..shared.errors import ProtocolError

if TYPE_CHECKING:
    import redis.asyncio

Command = tuple[str | bytes | int, ...]


async def read_each(redis: "redis.asyncio.Redis", *commands: Command) -> list[Any]:
    """Sends read commands together; they are not one transaction.

    Args:
        redis: Client; replies are bytes.
        commands: Each a command's name and its arguments, the key first.

    Returns:
        A reply for each, in the shape redis-py gives it; a `ProtocolError` in the
        place of a reply where the key is of another type than the command reads.

    Raises:
        RedisError: Any other error, of the connection or of one command.
    """
    pipeline = redis.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies = await pipeline.execute(raise_on_error=False)
    return [
        _checked(command, reply)
        for command, reply in zip(commands, replies, strict=True)
    ]


async def read(redis: "redis.asyncio.Redis", *commands: Command) -> list[Any]:
    """Sends read commands together, as `read_each` does.

    Raises:
        ProtocolError: A key is of another type than its command reads.
    """
    replies = await read_each(redis, *commands)
    for reply in replies:
        if isinstance(reply, ProtocolError):
            raise reply
    return replies


def _checked(command: Command, reply: object) -> object:
    if not isinstance(reply, Exception):
        return reply
    if "WRONGTYPE" not in str(reply):
        raise reply
    key = command[1]
    shown = key.decode(errors="replace") if isinstance(key, bytes) else str(key)
    return ProtocolError(
        f"the key {shown} has another type than {command[0]!r} reads; "
        "something other than tokenmill wrote it"
    )
