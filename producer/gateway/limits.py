"""Bounds on what a client may do: bytes of a body, time to send it, open requests."""

import asyncio
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from .errors import RETRY_S, ApiError, respond, retry_after
from .sse import BOUNDED, ENDED

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ...shared.config import GatewayConfig

_UPLOADS: Final = frozenset({"/v1/files"})
"""Bodies that are read piece by piece, with a limit of their own."""


class Limits:
    """Middle layer: refuses what is too large, too slow or too much.

    Args:
        app: What it stands before.
        settings: The bounds.
    """

    def __init__(self, app: "ASGIApp", settings: "GatewayConfig") -> None:
        self._app = app
        self._settings = settings
        self._open = 0

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return await refusal(scope, receive, send)
        self._open += 1
        try:
            body = _Body(
                scope, receive, self._most(scope), self._settings.slow_client_s
            )
            bounded = _bounded(scope, send, self._settings.slow_client_s)
            await self._app(scope, body.receive, bounded)
        finally:
            self._open -= 1

    def _most(self, scope: "Scope") -> int | None:
        upload = scope["method"] == "POST" and scope["path"] in _UPLOADS
        return None if upload else self._settings.max_body_bytes

    def _refusal(self, scope: "Scope") -> Response | None:
        if self._open >= self._settings.max_requests:
            error = ApiError(
                503,
                f"{self._open} requests are open (gateway.max_requests); try again",
                code="too_many_requests",
                headers=retry_after(RETRY_S),
            )
            return respond(error)
        most = self._most(scope)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if most is not None and length.isdigit() and int(length) > most:
            return respond(too_large(most))
        return None


def too_large(most: int) -> ApiError:
    """Returns the error of a body that is larger than `most` bytes."""
    return ApiError(
        413,
        f"the body has more than {most} bytes (gateway.max_body_bytes)",
        code="payload_too_large",
        # The rest is not read: the connection cannot be used again.
        headers={"Connection": "close"},
    )


class _Body:
    """The body of one request as it comes in."""

    def __init__(
        self, scope: "Scope", receive: "Receive", most: int | None, slow_s: float
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._most = most
        self._slow_s = slow_s
        self._size = 0
        self._whole = False

    async def receive(self) -> "Message":
        if self._whole:
            return await self._receive()  # all that may come is that the client left
        try:
            async with asyncio.timeout(self._slow_s):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"nothing of the body came for {self._slow_s:g} s",
                code="request_too_slow",
                headers={"Connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            self._scope[ENDED] = "client_left"
        self._size += len(message.get("body", b""))
        if self._most is not None and self._size > self._most:
            raise too_large(self._most)
        self._whole = not message.get("more_body", False)
        return message


def _bounded(scope: "Scope", send: "Send", slow_s: float) -> "Send":
    """Cuts off a client that does not take its answer; streams see to that alone."""

    async def bounded(message: "Message") -> None:
        if scope.get(BOUNDED):
            await send(message)
            return
        async with asyncio.timeout(slow_s):
            await send(message)

    return bounded
