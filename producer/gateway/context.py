"""What the endpoints share: the client, the settings, the keys, background work."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import structlog
from fastapi import Request

from ...shared.tasks import end_tasks
from ..client import Client

if TYPE_CHECKING:
    import redis.asyncio

    from ...shared.config import Config

PATIENCE_S: Final = 10.0
"""Blips of Redis are waited out for so long; a caller of HTTP then tries again."""
_AGAIN_S: Final = 1.0
_COUNTING: Final = 8
"""Of the 64 connections of a client."""
_log = structlog.get_logger(__name__)

Work = Callable[[], Awaitable[object]]
"""Makes a coroutine that runs for as long as the gateway does."""


class Gateway:
    """One gateway on one event loop.

    Args:
        config: Settings in force.
        url: Where the pool's Redis is.
    """

    def __init__(self, config: "Config", url: str) -> None:
        from .auth import KeyRing
        from .batches_keeper import BatchKeeper
        from .files import Files
        from .progress import Progress
        from .token_texts import TokenTexts

        self.config = config
        self.url = url
        self.address: str | None = None
        """Where it answers, as `http://host:port`; None until that is known."""
        self.client = Client(url, patience_s=PATIENCE_S)
        self.keys = KeyRing(self)
        self.token_texts = TokenTexts(self)
        self.progress = Progress(self)
        self.files = Files(self)
        self.batches = BatchKeeper(self)
        self.counting = asyncio.Semaphore(_COUNTING)
        """Held by who watches keys of Redis on one connection and reads over another:
        as many as there are connections would wait for each other."""
        self.is_unready = False
        """Set on SIGTERM: balancers are told, and everything is served still."""
        self.draining = asyncio.Event()
        """Set soon after: no new requests, and `leaving` in `gateway.drain_s`."""
        self.leaving = asyncio.Event()
        """Set when open requests have had their time: they end now."""
        self._work: list[Work] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def redis(self) -> "redis.asyncio.Redis":
        """The client's connection pool; replies are bytes."""
        return self.client.session.redis

    def background(self, work: Work) -> None:
        """Runs something for as long as the gateway does, again after a failure.

        Args:
            work: Makes the coroutine. One that returns is done.
        """
        self._work.append(work)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connects, runs the background work, and ends both."""
        await self.client.open()
        try:
            for work in self._work:
                task = asyncio.create_task(self._keep(work))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            yield
        finally:
            await end_tasks(*self._tasks)
            await self.client.close()
            self.files.close()

    async def drain(self) -> None:
        """Gives open requests `gateway.drain_s`, then tells them to end."""
        if self.draining.is_set():
            return
        self.draining.set()
        await asyncio.sleep(self.config.gateway.drain_s)
        self.leaving.set()

    async def _keep(self, work: Work) -> None:
        while True:
            try:
                await work()
                return
            except Exception:  # noqa: BLE001 - it begins again, and the log says why
                name = getattr(work, "__qualname__", repr(work))
                _log.exception("background_work_failed", work=name, again_in_s=_AGAIN_S)
            await asyncio.sleep(_AGAIN_S)


async def gateway(request: Request) -> Gateway:
    """Returns the gateway that serves a request; for `Depends`.

    It is a coroutine since FastAPI would run a plain function on another thread.
    """
    found = request.app.state.gateway
    assert isinstance(found, Gateway)
    return found
