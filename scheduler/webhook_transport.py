"""HTTP for webhooks: one POST to an address that was checked when it was connected to.

A name is looked up once for each connection, the addresses that it stands for are
checked, and one of these very addresses is connected to: what the name stands for a
moment later (DNS rebinding) does not matter. The URL keeps the name, so that TLS and
the header Host are those of the name.
"""

import asyncio
import concurrent.futures
import socket
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final, Self

import httpcore
import httpx
import msgspec

from ..shared.webhook_target import Address, is_public, parse_address

MOST_CONNECTIONS: Final = 128
MOST_ADDRESSES: Final = 3
"""Of one name, tried in turn."""
_LOOKUPS: Final = 32
"""Names looked up at once: a slow server of names must not hold up other threads."""
Resolve = Callable[[str, int], Awaitable[list[Address]]]


class TargetRefused(Exception):
    """A host has no address that webhooks may go to."""


class Answer(msgspec.Struct, frozen=True):
    """What a receiver said. Its body is never read."""

    status: int
    retry_after: str | None = None


class Resolver:
    """Looks names up, on threads of its own.

    A look-up cannot be broken off. Those who ask for one host meanwhile share it, so a
    name whose server hangs takes one thread, and not one for each delivery.
    """

    def __init__(self) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(_LOOKUPS, "webhook-names")
        self._running: dict[tuple[str, int], asyncio.Future[list[Any]]] = {}

    async def __call__(self, host: str, port: int) -> list[Address]:
        """Returns the addresses of a host, in the system's order.

        Raises:
            OSError: There are none.
            UnicodeError: The host cannot be a name.
        """
        rows = await asyncio.shield(self._looking_up(host, port))
        found = [parse_address(str(row[4][0])) for row in rows]
        return list(dict.fromkeys(one for one in found if one is not None))

    def _looking_up(self, host: str, port: int) -> "asyncio.Future[list[Any]]":
        found = self._running.get((host, port))
        if found is None:
            found = asyncio.get_running_loop().run_in_executor(
                self._threads,
                lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
            )
            self._running[host, port] = found
            found.add_done_callback(lambda done: self._forget(host, port, done))
        return found

    def _forget(self, host: str, port: int, done: "asyncio.Future[list[Any]]") -> None:
        del self._running[host, port]
        if not done.cancelled():
            done.exception()  # seen, should nobody have waited for so long

    def close(self) -> None:
        """Ends the threads, without waiting for a look-up that hangs."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were looked up and checked here.

    Args:
        resolve: Looks a name up.
        allow_private: Whether every address will do.
    """

    def __init__(self, resolve: Resolve, *, allow_private: bool) -> None:
        self._resolve = resolve
        self._allow_private = allow_private
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's interface
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connects to a host.

        Raises:
            TargetRefused: None of its addresses may be connected to.
            ConnectError: None of them answers, or it has none.
        """
        try:
            addresses = await self._resolve(host, port)
        except OSError as error:
            raise httpcore.ConnectError("its name cannot be looked up") from error
        except UnicodeError as error:
            raise TargetRefused("its host cannot be a name") from error
        allowed = [a for a in addresses if self._allow_private or is_public(a)]
        if not allowed:
            raise TargetRefused(
                "its name stands for no address of the public internet; deliver to "
                "others with webhooks.allow_private"
            )
        failure: Exception | None = None
        for address in allowed[:MOST_ADDRESSES]:
            try:
                return await self._inner.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure or httpcore.ConnectError("it has no address")

    async def sleep(self, seconds: float) -> None:
        """Waits between retries of the library; it is told to make none."""
        await asyncio.sleep(seconds)


class _Body(httpx.AsyncByteStream):
    def __init__(self, stream: AsyncIterable[bytes]) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        close = getattr(self._stream, "aclose", None)
        if close is not None:
            await close()


class PinnedTransport(httpx.AsyncBaseTransport):
    """httpx's transport over `PinnedBackend`; connections are never used again."""

    def __init__(self, backend: PinnedBackend) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(),
            max_connections=MOST_CONNECTIONS,
            max_keepalive_connections=0,
            network_backend=backend,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends one request."""
        assert isinstance(request.stream, httpx.AsyncByteStream)
        url = request.url
        sent = httpcore.Request(
            method=request.method,
            url=httpcore.URL(
                scheme=url.raw_scheme,
                host=url.raw_host,
                port=url.port,
                target=url.raw_path,
            ),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        got = await self._pool.handle_async_request(sent)
        assert isinstance(got.stream, AsyncIterable)
        return httpx.Response(
            got.status,
            headers=got.headers,
            stream=_Body(got.stream),
            extensions=got.extensions,
        )

    async def aclose(self) -> None:
        """Closes what is open."""
        await self._pool.aclose()


class Poster:
    """Sends webhooks.

    Args:
        timeout_s: Of one attempt, all in all.
        allow_private: Whether addresses that are not public will do.
        resolve: Looks names up; None asks the system.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        allow_private: bool,
        resolve: Resolve | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._resolver = Resolver()
        backend = PinnedBackend(resolve or self._resolver, allow_private=allow_private)
        self._client = httpx.AsyncClient(
            transport=PinnedTransport(backend),
            timeout=timeout_s,
            follow_redirects=False,
            # A proxy would look the name up by itself.
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()
        self._resolver.close()

    async def post(self, url: str, headers: dict[str, str], body: bytes) -> Answer:
        """Sends one request and returns the status of the answer.

        Raises:
            TargetRefused: The host has no address that it may go to.
            TimeoutError: It took longer than an attempt may.
            httpcore.NetworkError: No connection, or it broke.
            httpcore.ProtocolError: What answered does not speak HTTP.
        """
        async with (
            asyncio.timeout(self._timeout_s),
            self._client.stream("POST", url, headers=headers, content=body) as answer,
        ):
            return Answer(answer.status_code, answer.headers.get("retry-after"))
