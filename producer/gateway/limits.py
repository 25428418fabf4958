"""Bounds on what a client may do: bytes of a body, time to send it, open requests."""

import asyncio
import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from .errors import RETRY_S, ApiError, respond, retry_after
from .sse import BOUNDED, ENDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ...shared.config import GatewayConfig

_UPLOADS: Final = frozenset({"/v1/files"})
"""Bodies that are read piece by piece, with a limit of their own."""
_MOST_KEY_BYTES: Final = 4096
"""Of a login, which anyone may send."""
_SLOWEST_BYTES_S: Final = 16 * 1024
"""A body comes at this rate at least, beyond what any client is given."""
_FULL: Final = 503
_LINGER_S: Final = 5.0
_LINGER_BYTES: Final = 32 * 1024 * 1024
"""What is still taken of a body that was refused, and for how long."""
_PLAIN: Final = frozenset({b"", b"identity"})
PROBES: Final = frozenset({"/healthz", "/readyz"})
"""Answered however many requests are open: a full gateway is alive."""
OPEN: Final = "tokenmill.open"
"""Name in the request's scope of its `OpenRequest`."""


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
        self._of_key: Counter[str] = Counter()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            takes_rest = refusal.status_code != _FULL
            last = _lingering(receive, send, lambda: takes_rest)
            return await refusal(scope, receive, last)
        counted = scope["path"] not in PROBES
        opened = OpenRequest(self._of_key, self._settings.max_requests_per_key)
        scope[OPEN] = opened
        self._open += counted
        try:
            body = _Body(
                scope, receive, self._most(scope), self._settings.slow_client_s
            )
            bounded = _bounded(scope, send, self._settings.slow_client_s)
            last = _lingering(receive, bounded, lambda: body.is_too_large)
            await self._app(scope, body.receive, last)
        finally:
            self._open -= counted
            opened.close()

    def _most(self, scope: "Scope") -> int | None:
        if scope["path"] == "/login":
            return _MOST_KEY_BYTES
        upload = scope["method"] == "POST" and scope["path"] in _UPLOADS
        return None if upload else self._settings.max_body_bytes

    def _refusal(self, scope: "Scope") -> Response | None:
        is_full = self._open >= self._settings.max_requests
        if is_full and scope["path"] not in PROBES:
            error = ApiError(
                _FULL,
                f"{self._open} requests are open (gateway.max_requests); try again",
                code="too_many_requests",
                headers=retry_after(RETRY_S),
            )
            return respond(error)
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"").strip().lower()
        if encoding not in _PLAIN:
            return respond(_encoded(encoding))
        most = self._most(scope)
        length = headers.get(b"content-length", b"0")
        if most is not None and length.isdigit() and int(length) > most:
            return respond(too_large(most))
        return None


class OpenRequest:
    """One open request, once it is known by whose key.

    Args:
        of_key: Open requests of each key.
        most: As many as one key may have.
    """

    def __init__(self, of_key: Counter[str], most: int) -> None:
        self._of_key = of_key
        self._most = most
        self._key: str | None = None

    def is_of_key(self, key_id: str) -> None:
        """Counts the request for its key.

        Raises:
            ApiError: 429, the key has as many as it may have.
        """
        if self._key is not None:
            return
        if self._of_key[key_id] >= self._most:
            raise ApiError(
                429,
                f"{self._most} requests of this key are open "
                "(gateway.max_requests_per_key); try again when one has ended",
                code="too_many_requests",
                headers=retry_after(RETRY_S),
            )
        self._key = key_id
        self._of_key[key_id] += 1

    def close(self) -> None:
        """Forgets it."""
        if self._key is None:
            return
        self._of_key[self._key] -= 1
        if not self._of_key[self._key]:
            del self._of_key[self._key]


def too_large(most: int) -> ApiError:
    """Returns the error of a body that is larger than `most` bytes."""
    is_key = most == _MOST_KEY_BYTES
    which = '; expected {"key": "tm-…"}' if is_key else " (gateway.max_body_bytes)"
    return ApiError(
        413,
        f"the body has more than {most} bytes{which}",
        code="payload_too_large",
        # The rest is not read: the connection cannot be used again.
        headers={"Connection": "close"},
    )


def _encoded(encoding: bytes) -> ApiError:
    named = encoding[:40].decode(errors="replace")
    return ApiError(
        415,
        f"Content-Encoding: '{named}' is not supported; send the body as it is (a file "
        "for a batch may itself be gzip)",
        code="unsupported_encoding",
        param="Content-Encoding",
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
        self._waited_s = 0.0
        self._whole = False
        self.is_too_large = False

    async def receive(self) -> "Message":
        if self._whole:
            return await self._receive()  # all that may come is that the client left
        # Time in which the gateway itself is busy with the body does not count.
        due_s = self._slow_s + self._size / _SLOWEST_BYTES_S - self._waited_s
        began = time.monotonic()
        try:
            async with asyncio.timeout(max(min(due_s, self._slow_s), 0)):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body comes too slowly: nothing of it for {self._slow_s:g} s, or "
                f"less than {_SLOWEST_BYTES_S} bytes a second",
                code="request_too_slow",
                headers={"Connection": "close"},
            ) from None
        self._waited_s += time.monotonic() - began
        if message["type"] == "http.disconnect":
            self._scope[ENDED] = "client_left"
        self._size += len(message.get("body", b""))
        if self._most is not None and self._size > self._most:
            self.is_too_large = True
            raise too_large(self._most)
        self._whole = not message.get("more_body", False)
        return message


def _lingering(
    receive: "Receive", send: "Send", takes_rest: "Callable[[], bool]"
) -> "Send":
    """Lets the sender of a body that is refused read why, before it is cut off.

    A connection that is closed with bytes unread is reset, and with it goes the answer
    that its client had not read yet. So the answer is sent, then the rest is dropped,
    and then it ends.
    """

    async def last(message: "Message") -> None:
        is_end = message["type"] == "http.response.body" and not message.get(
            "more_body", False
        )
        if not (is_end and takes_rest()):
            await send(message)
            return
        await send({**message, "more_body": True})
        await _drop_rest(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return last


async def _drop_rest(receive: "Receive") -> None:
    left, goes_on = _LINGER_BYTES, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while goes_on and left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                goes_on = bool(message.get("more_body", False))


def _bounded(scope: "Scope", send: "Send", slow_s: float) -> "Send":
    """Cuts off a client that does not take its answer; streams see to that alone."""

    async def bounded(message: "Message") -> None:
        if scope.get(BOUNDED):
            await send(message)
            return
        async with asyncio.timeout(slow_s):
            await send(message)

    return bounded
