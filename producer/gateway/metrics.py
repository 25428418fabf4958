"""The gateway counts its requests and shows itself to Prometheus."""

import asyncio
import time
from typing import TYPE_CHECKING, Final

from ...shared.metrics.catalog import HTTP_OPEN, HTTP_REQUESTS, HTTP_SECONDS
from ...shared.metrics.instruments import OTHER
from ...shared.metrics.serving import ASK_S, shown
from ...shared.outage import REDIS_ERRORS, Outage
from .request_log import METHODS

if TYPE_CHECKING:
    import redis.asyncio
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .context import Gateway

_ANSWER_S: Final = ASK_S / 2
"""Redis has this long, so that a scrape can still say that it does not answer."""


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
    method = scope["method"] if scope["method"] in METHODS else OTHER
    HTTP_REQUESTS.add(method, route, str(status))
    HTTP_SECONDS.observe(seconds, method, route)


class Reach:
    """Looks at each scrape whether Redis answers: between calls nothing else would.

    Args:
        client: Redis.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client
        self._outage = Outage(name="gateway")

    async def __call__(self) -> None:
        """Notes that it answers, or that it does not."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._client.ping()
        except REDIS_ERRORS as error:
            self._outage.failed(None, error)
        else:
            self._outage.recovered()


async def show(owner: "Gateway") -> None:
    """Announces the gateway and serves its metrics until cancelled.

    Args:
        owner: The gateway, connected.
    """
    reach = Reach(owner.redis)
    async with shown(
        owner.redis, owner.config, "gateway", ask=reach, address=owner.address
    ):
        await asyncio.Event().wait()
