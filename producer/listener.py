"""One pub/sub connection per client, shared by everyone who waits for a job.

redis-py's own `PubSub` costs several times as much per message, and tells nobody
when it has reconnected. Here each watcher learns that messages may have been lost,
and reads the log instead.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from ..shared.tasks import end_tasks
from .inbox import SILENCE_S, Watcher

_PROBE_S: Final = 3.0
"""Time for Redis to answer the probe before the connection counts as dead."""
_BACKOFF_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Waits before the attempts to reconnect; the last one repeats."""
_CHANNELS_PER_COMMAND: Final = 500


class Link:
    """One connection in pub/sub mode, from its opening to its first error."""

    def __init__(self, connection: AbstractConnection) -> None:
        self.connection = connection
        self.lock = asyncio.Lock()
        # Redis answers every channel of SUBSCRIBE and UNSUBSCRIBE once and in order,
        # so two counters tell which commands have been acknowledged.
        self._num_sent = 0
        self._num_acknowledged = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._error: Exception | None = None

    async def send(self, command: bytes, channels: Sequence[bytes]) -> None:
        """Sends SUBSCRIBE or UNSUBSCRIBE; the caller holds `lock`."""
        for start in range(0, len(channels), _CHANNELS_PER_COMMAND):
            batch = channels[start : start + _CHANNELS_PER_COMMAND]
            self._num_sent += len(batch)
            await self.connection.send_command(command, *batch, check_health=False)

    async def acknowledged(self) -> None:
        """Waits until Redis has answered everything sent so far."""
        if self._error is not None:
            raise RedisConnectionError(str(self._error))
        if self._num_acknowledged < self._num_sent:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((self._num_sent, future))
            await future

    async def read(self, dispatch: Callable[[bytes, bytes], None]) -> None:
        """Hands messages to `dispatch` until the connection breaks.

        Raises:
            RedisError: It broke, or did not answer a probe.
        """
        probed = False
        while True:
            answer = await self.connection.read_response(
                timeout=_PROBE_S if probed else SILENCE_S, disconnect_on_error=False
            )
            if answer is None:
                if probed:
                    raise RedisConnectionError("the pub/sub connection is dead")
                probed = True
                async with self.lock:
                    await self.connection.send_command(b"PING", check_health=False)
                continue
            probed = False
            if answer[0] == b"message":
                dispatch(answer[1], answer[2])
            elif answer[0] in (b"subscribe", b"unsubscribe"):
                self._count_acknowledgement()

    def _count_acknowledgement(self) -> None:
        self._num_acknowledged += 1
        while self._waiting and self._waiting[0][0] <= self._num_acknowledged:
            future = self._waiting.popleft()[1]
            if not future.done():
                future.set_result(None)

    async def fail(self, error: Exception, *, wait: bool = False) -> None:
        """Wakes everyone who waits for an acknowledgement, and disconnects.

        Args:
            error: Why.
            wait: Wait for the end of the connection; a dead one could take long.
        """
        self._error = error
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(RedisConnectionError(str(error)))
        self._waiting.clear()
        with contextlib.suppress(RedisError, OSError):
            await self.connection.disconnect(nowait=not wait)


class Listener:
    """Subscribes many watchers over one connection, and reconnects for them.

    Args:
        redis: Client whose connection settings are used; its pool is left alone.
    """

    def __init__(self, redis: "redis.asyncio.Redis") -> None:
        self._redis = redis
        self._watchers: dict[bytes, list[Watcher]] = {}
        self._link: Link | None = None
        self._links: set[Link] = set()
        """`_link` and one that is being opened."""
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._reopening = False
        self.num_links = 0
        """Connections opened so far; more than one means that some broke."""

    async def subscribe(self, channels: Sequence[bytes], watcher: Watcher) -> None:
        """Adds a watcher and returns once Redis has acknowledged every channel.

        Args:
            channels: Full channel names.
            watcher: Told of each message from now on.

        Raises:
            RedisError: There is no connection, or it broke before the answer.
        """
        for channel in channels:
            self._watchers.setdefault(channel, []).append(watcher)
        try:
            link = await self._open_link()
            async with link.lock:
                await link.send(b"SUBSCRIBE", channels)
            await link.acknowledged()
        except BaseException:
            self.unsubscribe(channels, watcher)
            raise

    def unsubscribe(self, channels: Iterable[bytes], watcher: Watcher) -> None:
        """Removes a watcher; channels that nobody watches any more are left."""
        left: list[bytes] = []
        for channel in channels:
            watchers = self._watchers.get(channel)
            if watchers is None or watcher not in watchers:
                continue
            watchers.remove(watcher)
            if not watchers:
                del self._watchers[channel]
                left.append(channel)
        if left and self._link is not None and not self._closed:
            self._start(self._leave(self._link, left))

    async def close(self) -> None:
        """Ends the connection; watchers are woken for the last time."""
        self._closed = True
        await end_tasks(*self._tasks)
        closed = RedisConnectionError("the client was closed")
        for link in list(self._links):
            await self._drop(link, closed, wait=True)
        self._interrupt_all()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _leave(self, link: Link, channels: list[bytes]) -> None:
        # A connection that broke has left every channel by itself.
        with contextlib.suppress(RedisError, OSError):
            async with link.lock:
                # Checked under the lock: whoever came back since then sends its own
                # SUBSCRIBE after this, or stands among the watchers already.
                gone = [c for c in channels if c not in self._watchers]
                await link.send(b"UNSUBSCRIBE", gone)

    async def _open_link(self) -> Link:
        async with self._opening:
            if self._link is not None:
                return self._link
            if self._closed:
                raise RedisConnectionError("the client is closed")
            link = await self._connect()
            self._link = link
            if self.num_links:
                self._interrupt_all()
            self.num_links += 1
            return link

    async def _connect(self) -> Link:
        """Opens a link that is subscribed to everything watched."""
        connection = self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        link = Link(connection)
        self._links.add(link)
        try:
            await connection.connect()
            self._start(self._read(link))
            async with link.lock:
                await link.send(b"SUBSCRIBE", list(self._watchers))
            await link.acknowledged()
        except OSError as error:
            await self._drop(link, error)
            raise RedisConnectionError(str(error)) from error
        except BaseException:
            await self._drop(link, RedisConnectionError("it was never subscribed"))
            raise
        return link

    async def _drop(self, link: Link, error: Exception, *, wait: bool = False) -> None:
        self._links.discard(link)
        if self._link is link:
            self._link = None
        await link.fail(error, wait=wait)

    async def _read(self, link: Link) -> None:
        """Reads one link to its end, then opens the next for those who wait."""
        try:
            await link.read(self._dispatch)
        except (RedisError, OSError) as error:
            await self._drop(link, error)
        if not self._reopening:
            self._reopening = True
            try:
                await self._reopen()
            finally:
                self._reopening = False

    async def _reopen(self) -> None:
        attempt = 0
        while self._watchers and self._link is None and not self._closed:
            await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1
            with contextlib.suppress(RedisError, OSError):
                await self._open_link()

    def _interrupt_all(self) -> None:
        unique = {id(w): w for several in self._watchers.values() for w in several}
        for watcher in unique.values():
            watcher.interrupted()

    def _dispatch(self, channel: bytes, data: bytes) -> None:
        for watcher in self._watchers.get(channel, ()):
            watcher.deliver(channel, data)
