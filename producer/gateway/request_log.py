"""One line for each request, and the id by which it is found again.

The line has who called what, and how that went; never a prompt, an answer or a key.
"""

import re
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import structlog
from starlette.requests import ClientDisconnect

from .errors import ApiError, respond
from .sse import ENDED, UNEXPECTED

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

JOBS: Final = "tokenmill.jobs"
"""Name in the request's scope of the ids of its jobs."""
_GIVEN_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Told by name; a caller may send any word."""
_QUIET: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Asked every few seconds; their lines are for debugging."""
_log = structlog.get_logger(__name__)


class RequestLog:
    """Outermost layer: names and times each request, and tells of it.

    Args:
        app: What it stands before.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        line = _Line(scope, send)
        try:
            with structlog.contextvars.bound_contextvars(request=line.request_id):
                await self._answer(line, scope, receive)
        finally:
            line.write()

    async def _answer(self, line: "_Line", scope: "Scope", receive: "Receive") -> None:
        try:
            await self._app(scope, receive, line.send)
        except ClientDisconnect:
            scope[ENDED] = "client_left"
        except ApiError as error:
            # Of a layer before the application's own handlers.
            await line.refuse(respond(error), receive)
        except Exception as error:  # noqa: BLE001 - the client is told, the log has it
            if line.has_begun and isinstance(error, OSError):
                # Of an answer on its way; before it, the fault is not the client's.
                is_slow = isinstance(error, TimeoutError)
                scope[ENDED] = "slow_client" if is_slow else "client_left"
                return
            _log.exception("unexpected_error", path=line.route)
            await line.refuse(respond(UNEXPECTED), receive)


class _Line:
    """What is told of one request."""

    def __init__(self, scope: "Scope", send: "Send") -> None:
        self._scope = scope
        self._send = send
        self._began = time.perf_counter()
        self._status = 0
        self._size = 0
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        known = _GIVEN_ID.fullmatch(given)
        self.request_id = given.decode() if known else f"req-{secrets.token_hex(12)}"

    @property
    def route(self) -> str:
        """The path as the application has it, without what names a job or a file."""
        route = self._scope.get("route")
        return str(getattr(route, "path", None) or "unmatched")

    async def send(self, message: "Message") -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = [*message["headers"], (b"x-request-id", self.request_id.encode())]
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            self._size += len(message.get("body", b""))
        await self._send(message)

    async def refuse(self, response: Any, receive: "Receive") -> None:  # noqa: ANN401
        """Answers with an error, unless an answer has begun."""
        if not self.has_begun:
            await response(self._scope, receive, self.send)

    @property
    def has_begun(self) -> bool:
        """Whether an answer has begun."""
        return bool(self._status)

    @property
    def _method(self) -> str:
        method = str(self._scope["method"])
        return method if method in METHODS else "other"

    def write(self) -> None:
        """Writes the line."""
        route, status = self.route, self._status or 499
        caller = self._scope.get("tokenmill.caller")
        facts: dict[str, object] = {
            "request": self.request_id,
            "method": self._method,
            "route": route,
            "status": status,
            "duration_ms": round((time.perf_counter() - self._began) * 1000, 1),
            "sent_bytes": self._size,
            "ended": self._scope.get(ENDED, "done"),
        }
        if caller is not None:
            facts |= {"tenant": caller.tenant, "key": caller.key_id or None}
        if jobs := self._scope.get(JOBS):
            facts["jobs"] = jobs
        path = self._scope["path"]
        is_dull = path in _QUIET or path.startswith("/dashboard/static/")
        quiet = is_dull and status < 400
        (_log.debug if quiet else _log.info)("http_request", **facts)
