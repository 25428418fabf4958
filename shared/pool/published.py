"""What a pool tells producers of itself, written as it starts."""

import asyncio
from typing import Final

import redis.asyncio
from redis.exceptions import BusyLoadingError

from ..config import Config
from ..errors import RedisUnavailable
from ..keys import POOL
from ..messages import encode
from ..pool_card import pool_card
from ..redis import translate
from .lines import line

_LOADING_WAIT_S: Final = 1.0


async def publish_card(client: "redis.asyncio.Redis", config: Config) -> None:
    """Writes the pool's card; a server that still loads its data is waited for.

    Args:
        client: Redis; closed where it cannot be used.
        config: Settings in force.

    Raises:
        RedisUnavailable: It does not answer.
    """
    card = encode(pool_card(config))
    while True:
        try:
            with translate():
                await client.set(POOL, card)
            return
        except RedisUnavailable as error:
            if not isinstance(error.__cause__, BusyLoadingError):
                await client.aclose()
                raise
            line("waiting for Redis, which is loading its data")
            await asyncio.sleep(_LOADING_WAIT_S)
        except BaseException:
            await client.aclose()
            raise
