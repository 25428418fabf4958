"""The gateway counts its requests and shows itself to Prometheus."""

import asyncio
import time
from typing import TYPE_CHECKING, Final

from ...shared.metrics.catalog import HTTP_OPEN, HTTP_REQUESTS, HTTP_SECONDS
from ...shared.metrics.instruments import OTHER
from ...shared.metrics.serving import shown

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .context import Gateway

_METHODS: Final = frozenset(
    ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
)


class CountRequests:
    """Counts requests by route, never by path: a caller may send any path.

    Args:
        app: What answers them.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answers one request and counts it at its first byte."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def counted(message: "Message") -> None:
            if message["type"] == "http.response.start":
                _count(scope, message["status"], time.perf_counter() - began)
            await send(message)

        HTTP_OPEN.add(by=1)
        try:
            await self._app(scope, receive, counted)
        finally:
            HTTP_OPEN.add(by=-1)


def _count(scope: "Scope", status: int, seconds: float) -> None:
    route = getattr(scope.get("route"), "path", OTHER)
    method = scope["method"] if scope["method"] in _METHODS else OTHER
    HTTP_REQUESTS.add(method, route, str(status))
    HTTP_SECONDS.observe(seconds, method, route)


async def show(owner: "Gateway") -> None:
    """Announces the gateway and serves its metrics until cancelled.

    Args:
        owner: The gateway, connected.
    """
    async with shown(owner.redis, owner.config, "gateway"):
        await asyncio.Event().wait()
