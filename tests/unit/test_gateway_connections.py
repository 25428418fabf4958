"""Connections of clients that take nothing are ended, whatever is left to send."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import uvicorn
from support.waiting import wait_until

from tokenmill.producer.gateway import connections

MUCH = b"x" * 8_000_000
START = {"type": "http.response.start", "status": 200, "headers": []}
PATIENCE_S = 0.2


@asynccontextmanager
async def connected(app):
    """A server, and a client that has asked and reads nothing."""
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
    port = server.servers[0].sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await wait_until(lambda: server.server_state.connections)
        yield server.server_state.connections
    finally:
        writer.transport.abort()
        await server.shutdown()


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
        async with asyncio.timeout(5):
            await is_cut.wait()
        await wait_until(lambda: not left, timeout_s=2, what="the connection's end")


async def test_a_whole_answer_that_nobody_takes_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LOOK_S", PATIENCE_S)

    async def app(_scope, _receive, send) -> None:
        await send({**START, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": MUCH})

    async with connected(app) as left:
        await wait_until(lambda: not left, timeout_s=5, what="the connection's end")
