"""What Redis would lose with its memory is followed, to be written again."""

import asyncio
from typing import Final, Protocol

import structlog

from ..shared.errors import TokenmillError
from .outage import REDIS_ERRORS

ROUTE_EVERY_S: Final = 0.2
"""A switch that nobody has seen for so long may be lost."""
ADAPTERS_EVERY_S: Final = 1.0
"""So may a change of a model's adapters."""
_log = structlog.get_logger(__name__)


class Follower(Protocol):
    """Remembers what stands in Redis."""

    async def follow(self) -> object:
        """Reads what has changed; writes again what has been lost."""


async def keep(follower: Follower, every_s: float, what: str, model: str) -> None:
    """Follows until cancelled; an outage, or what is not ours, is for the next look.

    Args:
        follower: Of what is to be kept.
        every_s: Between two looks.
        what: Is kept, for the log.
        model: Public name, for the log.
    """
    while True:
        try:
            await follower.follow()
        except (TokenmillError, *REDIS_ERRORS) as error:
            _log.debug("not_followed", what=what, model=model, error=str(error))
        await asyncio.sleep(every_s)
