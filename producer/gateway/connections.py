"""Connections that cost something and do nothing: they are closed for good.

uvicorn bounds the time between two requests, but neither the time before the first
nor that of a header which never ends: a connection that has begun no request between
two looks is closed here. And it closes politely, by waiting until the client has taken
what is left, which a client that was cut off for taking nothing never does: the
connection of an answer that was broken off is ended without that.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import structlog
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    _Protocol = Any
else:
    _Protocol = AutoHTTPProtocol

KEEP_ALIVE_S: Final = 75
"""An idle connection is kept for longer than proxies keep theirs."""
LOOK_S: Final = float(KEEP_ALIVE_S)
"""Between two looks at a connection: it is closed after twice that at the latest."""
_NO_HTTP_BODY: Final = ApiError(
    400,
    "what came is no request of HTTP/1.1 with a Host and at most 64 KiB of headers",
    code="invalid_http",
).body
_NO_HTTP: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b"
) % (len(_NO_HTTP_BODY), _NO_HTTP_BODY)
_BUSY: Final = object()
_CLOSING: Final = object()
_log = structlog.get_logger(__name__)


class BoundedProtocol(_Protocol):  # type: ignore[misc]
    """uvicorn's protocol, which looks at its connection now and then."""

    app: "ASGIApp"
    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self.app = _Whole(self.app, transport)
        self._look_later(_BUSY)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - says too little
        """Answers what is no HTTP, in the form of every other error."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_NO_HTTP)
        self.transport.close()

    def _look_later(self, seen: object) -> None:
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(LOOK_S, self._look, seen)

    def _look(self, seen: object) -> None:
        # The last request that was begun; none is a state like any other.
        state = self.cycle
        if self.transport.is_closing():
            state = _CLOSING  # and what is left to send is not taken
        elif state is not None and not state.response_complete:
            state = _BUSY
        if state is seen and state is not _BUSY:
            self.transport.abort()
        else:
            self._look_later(state)


class _Whole:
    """Ends the connection of an answer that was begun and not brought to its end.

    Args:
        app: What answers.
        transport: The connection.
    """

    def __init__(self, app: "ASGIApp", transport: asyncio.Transport) -> None:
        self._app = app
        self._transport = transport

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answers one request."""
        goes_on = False

        async def noted(message: "Message") -> None:
            nonlocal goes_on
            goes_on = True
            await send(message)
            is_body = message["type"] == "http.response.body"
            goes_on = not is_body or message.get("more_body", False)

        try:
            await self._app(_origin_form(scope), receive, noted)
        finally:
            if goes_on and not self._transport.is_closing():
                self._transport.abort()
                _log.debug("connection_cut")
                # The server hears of it before it sees that the answer has no end.
                await asyncio.sleep(0)


def _origin_form(scope: "Scope") -> "Scope":
    """Returns a request without the host in its target.

    Every server of HTTP/1.1 takes `GET http://host/path` too, and that host is then
    the request's, whatever the header says (RFC 9112, 3.2.2).
    """
    if scope["type"] != "http" or scope["path"].startswith("/"):
        return scope
    try:
        target = urlsplit(scope["raw_path"].decode("ascii"))
    except ValueError:
        return scope  # it is of no form, and found nowhere
    host = target.netloc.rpartition("@")[2]
    if target.scheme not in ("http", "https") or not host:
        return scope
    path = target.path or "/"
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {
        **scope,
        "path": unquote(path),
        "raw_path": path.encode("ascii"),
        "headers": [(b"host", host.encode("ascii")), *others],
    }
