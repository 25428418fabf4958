"""Several reads in one round trip, typed where redis-py's own types are not."""

import asyncio
import copy
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ..shared.errors import ProtocolError

if TYPE_CHECKING:
    import redis.asyncio

Command = tuple[str | bytes | int, ...]
_Asked = tuple[Sequence[Command], "asyncio.Future[list[Any]]"]
_IN_FLIGHT: Final = 2
"""Round trips at once, each with a connection: a long reply does not hold up others."""
_COMMANDS: Final = 600
"""Commands of one round trip, unless one caller alone has more."""


class Reads:
    """Reads of many callers, joined: those that come while others are on their way go
    together next. A thousand streams read their logs over two connections.

    Args:
        redis: Client; replies are bytes.
    """

    def __init__(self, redis: "redis.asyncio.Redis") -> None:
        self._redis = redis
        self._waiting: deque[_Asked] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def each(self, *commands: Command) -> list[Any]:
        """As `read_each`, perhaps in one round trip with other callers."""
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((commands, future))
        self._send_on()
        return [
            _checked(command, reply)
            for command, reply in zip(commands, await future, strict=True)
        ]

    async def all(self, *commands: Command) -> list[Any]:
        """As `read`, perhaps in one round trip with other callers."""
        return _none_bad(await self.each(*commands))

    async def close(self) -> None:
        """Waits for what is on its way, and for what goes once that is done."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # the next one starts in a callback

    def _send_on(self) -> None:
        if self._waiting and len(self._tasks) < _IN_FLIGHT:
            task = asyncio.get_running_loop().create_task(self._send())
            self._tasks.add(task)
            task.add_done_callback(self._sent)

    def _sent(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._send_on()

    async def _send(self) -> None:
        batch = self._next_batch()
        if not batch:
            return
        pipeline = self._redis.pipeline(transaction=False)
        for commands, _ in batch:
            for command in commands:
                pipeline.execute_command(*command)
        try:
            replies = await pipeline.execute(raise_on_error=False)
        except Exception as error:  # noqa: BLE001 - each caller raises it
            for _, future in batch:
                if not future.done():
                    # Each raises its own: a traceback is written by who raises.
                    future.set_exception(copy.copy(error))
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        else:
            _hand_out(batch, replies)

    def _next_batch(self) -> list[_Asked]:
        batch: list[_Asked] = []
        size = 0
        while self._waiting:
            commands, future = self._waiting[0]
            if batch and size + len(commands) > _COMMANDS:
                break
            self._waiting.popleft()
            if not future.done():  # a caller that was cancelled meanwhile
                batch.append((commands, future))
                size += len(commands)
        return batch


def _hand_out(batch: list[_Asked], replies: list[Any]) -> None:
    rest = iter(replies)
    for commands, future in batch:
        mine = [next(rest) for _ in commands]
        if not future.done():
            future.set_result(mine)


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
    return _none_bad(await read_each(redis, *commands))


def _none_bad(replies: list[Any]) -> list[Any]:
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
