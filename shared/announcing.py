"""How a process keeps its card in Redis for as long as it lives."""

import asyncio
import logging
from typing import Final

import redis.asyncio
import redis.exceptions
import structlog

from .clock import redis_ms
from .keys import PROCESSES, process_key
from .messages import encode
from .outage import REDIS_ERRORS
from .process_card import ProcessCard

CARD_MS: Final = 30_000
"""A card lives this long after its process's last sign."""
EVERY_S: Final = 10.0
"""Between two signs: two may be lost."""
_FORGET_MS: Final = 3_600_000
"""Names of processes that are gone leave the index after this long."""
_log = structlog.get_logger(__name__)


async def announce(client: redis.asyncio.Redis, card: ProcessCard) -> None:
    """Writes the card once; it expires after `CARD_MS`."""
    member = f"{card.kind}:{card.id}"
    now_ms = await redis_ms(client)
    async with client.pipeline(transaction=False) as pipe:
        pipe.set(process_key(member), encode(card), px=CARD_MS)
        pipe.zadd(PROCESSES, {member: now_ms})
        pipe.zremrangebyscore(PROCESSES, "-inf", now_ms - _FORGET_MS)
        await pipe.execute()


async def keep_announced(client: redis.asyncio.Redis, card: ProcessCard) -> None:
    """Renews the card until cancelled, then takes it back.

    While Redis is away it says nothing: the process's own loops log that. What Redis
    refuses, as without a permission, is told once.
    """
    member = f"{card.kind}:{card.id}"
    told = False
    try:
        while True:
            try:
                await announce(client, card)
            except REDIS_ERRORS as error:
                refused = isinstance(error, redis.exceptions.ResponseError)
                level = logging.WARNING if refused and not told else logging.DEBUG
                told = told or refused
                _log.log(level, "card_not_written", error=str(error) or repr(error))
            await asyncio.sleep(EVERY_S)
    finally:
        try:
            async with asyncio.timeout(1.0), client.pipeline(transaction=False) as pipe:
                pipe.delete(process_key(member))
                pipe.zrem(PROCESSES, member)
                await pipe.execute()
        except REDIS_ERRORS as error:
            _log.debug("card_left_to_expire", error=str(error) or repr(error))
