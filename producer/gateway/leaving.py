"""When nobody is to be answered any more: clients that leave, keys that are revoked."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import structlog

from ...shared.errors import TokenmillError

if TYPE_CHECKING:
    from starlette.types import Receive

    from .context import Gateway

STILL_ALLOWED: Final = "tokenmill.still_allowed"
"""Name in the request's scope of what tells whether its caller may still be here."""
LOOK_AGAIN_S: Final = 3.0
"""Between two looks at the key of a stream's caller."""
_log = structlog.get_logger(__name__)


async def until_refused(still_allowed: Callable[[], Awaitable[bool]] | None) -> None:
    """Returns once the caller of a stream may not be here any more."""
    if still_allowed is None:
        await asyncio.Event().wait()
        return
    allowed = True
    while allowed:
        await asyncio.sleep(LOOK_AGAIN_S)
        try:
            allowed = await still_allowed()
        except TokenmillError as error:
            # Redis is away: what cannot be asked now is asked again.
            _log.warning("key_not_looked_up", code=error.code)


async def until_left(receive: "Receive") -> None:
    """Returns once the client of a request, whose body was read, has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_left(
    owner: "Gateway", receive: "Receive", work: "asyncio.Task[Any]"
) -> str:
    """Waits for work on behalf of a client that waits without a stream.

    Args:
        owner: The gateway.
        receive: Of the request, whose body was read.
        work: What is waited for; it goes on whatever is returned.

    Returns:
        `done`, `client_left`, `timeout` or `shutting_down`.
    """
    left = asyncio.create_task(until_left(receive))
    leaving = asyncio.create_task(owner.leaving.wait())
    try:
        await asyncio.wait(
            (work, left, leaving),
            timeout=owner.config.gateway.request_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if work.done():
            return "done"
        if left.done():
            return "client_left"
        return "shutting_down" if leaving.done() else "timeout"
    finally:
        for task in (left, leaving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(left, leaving, return_exceptions=True)
