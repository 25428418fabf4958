"""Keeps who gets a model's jobs, should Redis lose it soon after it was said."""

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from ..shared.errors import TokenmillError
from ..shared.versions import Versions
from .outage import REDIS_ERRORS

if TYPE_CHECKING:
    import redis.asyncio

KEEP_EVERY_S: Final = 0.2
"""A switch that nobody has seen for so long may be lost with Redis' memory."""
_log = structlog.get_logger(__name__)


async def keep_route(client: "redis.asyncio.Redis", model: str) -> None:
    """Follows the versions of a model until cancelled, which writes lost ones again.

    Args:
        client: Redis; replies are bytes.
        model: Public name.
    """
    versions = Versions(client, model)
    while True:
        try:
            await versions.follow()
        except (TokenmillError, *REDIS_ERRORS) as error:
            _log.debug("route_not_followed", model=model, error=str(error))
        await asyncio.sleep(KEEP_EVERY_S)
