"""Several reads in one round trip, typed where redis-py's own types are not."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import redis.asyncio


async def read(
    redis: "redis.asyncio.Redis", *commands: tuple[str | bytes | int, ...]
) -> list[Any]:
    """Sends read commands together; they are not one transaction.

    Args:
        redis: Client; replies are bytes.
        commands: Each a command's name and its arguments.

    Returns:
        A reply for each, in the shape redis-py gives it.
    """
    pipeline = redis.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    return await pipeline.execute()
