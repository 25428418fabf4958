"""The gateway's process: where it listens, and how it ends.

On SIGTERM or SIGINT it takes no new connections, once balancers have had
`gateway.unready_s` to learn from /readyz that they should send none. Open requests go
on for `gateway.drain_s`; then streams end with an error event and whoever waits is told
to try again. A second signal ends it at once.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import structlog
import uvicorn
from fastapi import FastAPI

from ...shared.api_keys import KeyStore
from ...shared.errors import ConfigError
from ...shared.pool.lines import line
from ...shared.redis import connect, translate
from ...shared.signals import heard
from .app import create_app
from .auth import is_loopback
from .connections import KEEP_ALIVE_S, BoundedProtocol

if TYPE_CHECKING:
    from ...shared.config import Config, GatewayConfig
    from .context import Gateway

_LAST_WORDS_S: Final = 5.0
"""On top of `gateway.drain_s`: saying the last word, and cancelling jobs."""
_BACKLOG: Final = 2048
_log = structlog.get_logger(__name__)


class _Server(uvicorn.Server):
    """uvicorn, with signals and announcements of ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `_Signals`."""
        yield


class _Signals:
    """What a signal does.

    Args:
        server: Serves.
        owner: Knows who is to be told.
    """

    def __init__(self, server: uvicorn.Server, owner: "Gateway") -> None:
        self._server = server
        self._owner = owner
        self._draining: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        for number in heard():
            loop.add_signal_handler(number, self._hear, number)

    def _hear(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining is not None:
            _log.warning("ending_now", signal=name)
            self._owner.leaving.set()
            self._server.should_exit = True
            self._server.force_exit = True
            return
        _log.info("draining", signal=name, most_s=self._owner.config.gateway.drain_s)
        self._draining = asyncio.create_task(self._end())

    async def _end(self) -> None:
        self._owner.is_unready = True
        await asyncio.sleep(self._owner.config.gateway.unready_s)
        self._server.should_exit = True
        await self._owner.drain()


async def serve(config: "Config", url: str) -> None:
    """Runs the gateway until a signal ends it.

    Args:
        config: Settings in force.
        url: Where the pool's Redis is.

    Raises:
        ConfigError: It would listen beyond this host with no key to keep others out,
            or cannot listen where it is to.
        RedisUnavailable: Redis does not answer.
    """
    settings = config.gateway
    await require_keys(settings, url)
    listening = _listen(settings)
    app = create_app(config, url)
    app.openapi()  # some tenths of a second that no caller's stream should wait for
    owner: Gateway = app.state.gateway
    owner.address = _address(listening)
    server = make_server(app, settings)
    _Signals(server, owner)
    announcing = asyncio.create_task(_announce(server, settings, owner.address))
    try:
        await server.serve(sockets=[listening])
    finally:
        announcing.cancel()
        listening.close()


def make_server(app: FastAPI, settings: "GatewayConfig") -> uvicorn.Server:
    """Returns what answers the connections of an application.

    Args:
        app: The application.
        settings: Of the gateway.
    """
    return _Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            access_log=False,
            log_config=None,
            lifespan="on",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(settings.drain_s + _LAST_WORDS_S),
        )
    )


async def require_keys(settings: "GatewayConfig", url: str) -> None:
    """Makes sure that no gateway without keys is reachable from other hosts.

    Raises:
        ConfigError: This one would be.
        RedisUnavailable: Redis does not answer.
    """
    if settings.auth == "none" and not is_loopback(settings):
        _log.warning("open_to_all", host=settings.host, cure="gateway.auth = 'keys'")
    if settings.auth == "none" or is_loopback(settings):
        return
    client = connect(url)
    try:
        with translate():
            count = await KeyStore(client).count()
    finally:
        await client.aclose()
    if not count:
        raise ConfigError(
            "gateway.host",
            f"value '{settings.host}' can be reached from other hosts and there is no "
            "API key yet; make one with: tokenmill keys create (or let everyone in "
            "with gateway.auth = 'none')",
        )


def _listen(settings: "GatewayConfig") -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            "gateway.port",
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "choose another with --port, or 0 for a free one",
        ) from error
    listening.listen(_BACKLOG)
    listening.setblocking(False)
    return listening


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _announce(
    server: uvicorn.Server, settings: "GatewayConfig", address: str
) -> None:
    """Prints where it listens, once it does."""
    while not server.started:  # noqa: ASYNC110 - uvicorn has a flag, no event
        await asyncio.sleep(0.02)
    _log.info("gateway_ready", address=address, auth=settings.auth)
    line(f"gateway {address}")
    line(f"dashboard {address}/")
