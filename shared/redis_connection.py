"""redis-py's connections with a send that can be cancelled, and packed in C.

redis-py 5.3 sends under `asyncio.wait_for`, which in Python 3.11 drops a cancellation
that arrives just as the send completes: a task that loops over commands then survives
its own cancel, and a drain hangs. `asyncio.timeout` does not, and makes no task for
each command either.

Its asynchronous connections also pack commands in Python though hiredis is there; with
some twenty arguments a job that is a third of a producer's time.
"""

import asyncio
from collections.abc import Iterable

import hiredis
from redis.asyncio.connection import (
    AbstractConnection,
    BlockingConnectionPool,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.typing import EncodableT

_LAST_WORDS_S = 0.2


class _CancellableSend(AbstractConnection):
    async def on_connect(self) -> None:
        """Greets the server. A health check amid the greeting is never due: refused by
        a server without room for clients, it would connect again from within, and
        again.
        """
        now = asyncio.get_running_loop().time()
        self.next_health_check = now + self.health_check_interval
        await super().on_connect()

    def pack_command(self, *args: EncodableT) -> list[bytes]:
        """Returns a command as bytes for the wire."""
        name, *rest = args
        words = name.split() if isinstance(name, str | bytes) else [name]
        try:
            return [hiredis.pack_command((*words, *rest))]
        except TypeError:
            # Types that hiredis does not take, or an error that redis-py words better.
            packed: list[bytes] = super().pack_command(*args)
            return packed

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        """Writes a packed command within the socket's time-out."""
        if not self.is_connected:
            await self.connect()  # type: ignore[no-untyped-call]
        elif check_health:
            await self.check_health()  # type: ignore[no-untyped-call]
        if isinstance(command, str):
            command = command.encode()
        buffers = [command] if isinstance(command, bytes) else command
        writer = self._writer
        assert writer is not None
        try:
            async with asyncio.timeout(self.socket_timeout):
                writer.writelines(buffers)
                await writer.drain()
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise RedisTimeoutError("Timeout writing to socket") from None
        except OSError as error:
            reason = await self._last_words() or f"Error writing to socket: {error}"
            await self.disconnect(nowait=True)
            raise RedisConnectionError(reason) from error
        except BaseException:
            # Half a command may be out: nobody must use this connection again.
            await self.disconnect(nowait=True)
            raise

    async def _last_words(self) -> str:
        """Returns what the server said before it closed; a full one says why."""
        try:
            await self.read_response(timeout=_LAST_WORDS_S, disconnect_on_error=False)
        except RedisError as error:
            said = str(error)
            return said if "max number of clients" in said else ""
        return ""


class _TcpConnection(_CancellableSend, Connection):
    pass


class _TlsConnection(_CancellableSend, SSLConnection):
    pass


class _UnixConnection(_CancellableSend, UnixDomainSocketConnection):
    pass


def make_cancellable(pool: BlockingConnectionPool) -> None:
    """Has a pool that made no connection yet use these connections from now on."""
    if issubclass(pool.connection_class, SSLConnection):
        pool.connection_class = _TlsConnection
    elif issubclass(pool.connection_class, UnixDomainSocketConnection):
        pool.connection_class = _UnixConnection
    else:
        pool.connection_class = _TcpConnection
