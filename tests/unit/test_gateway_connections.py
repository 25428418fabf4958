"""Connections of clients that take nothing are ended, whatever is left to send."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
import uvicorn
from support.waiting import wait_until

from tokenmill.producer.gateway import connections

MUCH = b"x" * 8_000_000
START = {"type": "http.response.start", "status": 200, "headers": []}
PATIENCE_S = 0.2


@asynccontextmanager
async def listening(app):
    """A server, and where it listens."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=connections.BoundedProtocol,
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
    )
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup()
    try:
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        await server.shutdown()


@asynccontextmanager
async def connected(app):
    """A server, and a client that has asked and reads nothing."""
    async with listening(app) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        try:
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await wait_until(lambda: server.server_state.connections)
            yield server.server_state.connections
        finally:
            writer.transport.abort()


async def test_an_answer_that_was_broken_off_leaves_no_connection() -> None:
    is_cut = asyncio.Event()

    async def app(_scope, _receive, send) -> None:
        await send(START)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    body = {"type": "http.response.body", "body": MUCH}
                    await send({**body, "more_body": True})
        except TimeoutError:
            is_cut.set()  # as the layers of the gateway do: the log has the rest

    async with connected(app) as left:
        async with asyncio.timeout(60):
            await is_cut.wait()
        await wait_until(lambda: not left, what="the connection's end")


async def test_a_whole_answer_that_nobody_takes_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LOOK_S", PATIENCE_S)

    async def app(_scope, _receive, send) -> None:
        await send({**START, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": MUCH})

    async with connected(app) as left:
        await wait_until(lambda: not left, what="the connection's end")


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000,
        b"hello\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_in_the_form_of_other_errors(said) -> None:
    async def app(_scope, _receive, _send) -> None:
        raise AssertionError("it was taken for a request")

    async with listening(app) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            told = json.loads(await reader.readexactly(size))
        writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert told["error"]["code"] == "invalid_http"


async def test_noise_behind_an_answer_that_goes_on_adds_nothing_to_it() -> None:
    async def app(_scope, receive, send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async with listening(app) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        async with asyncio.timeout(60):
            found = await reader.readuntil(b"begun")
            writer.write(b"no chunk\r\n")
            found += await reader.read()
        writer.close()
    assert b"invalid_http" not in found


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        ("/a%20b?c=1", "/a b", "x"),
        ("http://me@other:80/a%20b?c=1", "/a b", "other:80"),
        ("http://other?c=1", "/", "other"),
        ("http://[::1/a?c=1", "http://[::1/a", "x"),
        ("ftp://other/a?c=1", "ftp://other/a", "x"),
    ],
)
async def test_a_target_may_name_the_host(target: str, path: str, host: str) -> None:
    seen = []

    async def app(scope, _receive, send) -> None:
        seen.append((scope["path"], scope["query_string"], dict(scope["headers"])))
        await send(START)
        await send({"type": "http.response.body"})

    async with listening(app) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
    ((seen_path, query, headers),) = seen
    assert (seen_path, query, headers[b"host"]) == (path, b"c=1", host.encode())
