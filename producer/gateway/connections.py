"""Connections that send no request: idle ones, and those that drip a header.

uvicorn bounds the time between two requests, but neither the time before the first
nor that of a header which never ends. Here a connection that has begun no request
between two looks is closed.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    _Protocol = Any
else:
    _Protocol = AutoHTTPProtocol

KEEP_ALIVE_S: Final = 75
"""An idle connection is kept for longer than proxies keep theirs."""
LOOK_S: Final = float(KEEP_ALIVE_S)
"""Between two looks at a connection: it is closed after twice that at the latest."""
_BUSY: Final = object()


class BoundedProtocol(_Protocol):  # type: ignore[misc]
    """uvicorn's protocol, which looks at its connection now and then."""

    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._look_later(_BUSY)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def _look_later(self, seen: object) -> None:
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(LOOK_S, self._look, seen)

    def _look(self, seen: object) -> None:
        # The last request that was begun; none is a state like any other.
        state = self.cycle
        if state is not None and not state.response_complete:
            state = _BUSY
        if state is seen and state is not _BUSY:
            self.transport.abort()
        else:
            self._look_later(state)
