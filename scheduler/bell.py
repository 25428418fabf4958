"""The bell: something arrived, or room was made."""

import asyncio
from collections.abc import Sequence
from typing import Final

import redis.asyncio

SILENCE_S: Final = 10.0
"""After this long without a message the connection is checked."""


async def listen(
    client: "redis.asyncio.Redis", channel: str, bells: Sequence[asyncio.Event]
) -> None:
    """Sets every event at each message, until cancelled.

    Args:
        client: Redis.
        channel: The shard's bell.
        bells: Who wants to know.
    """
    async with client.pubsub() as pubsub:
        await pubsub.subscribe(channel)
        while True:
            message = await pubsub.get_message(timeout=SILENCE_S)
            if message is None:
                await pubsub.ping()
                continue
            # The acknowledgement counts: what rang before it was not heard.
            if message["type"] in ("message", "subscribe"):
                for bell in bells:
                    bell.set()


async def heard(bell: asyncio.Event, timeout_s: float | None) -> bool:
    """Waits for an event; False when it was not set in time.

    `asyncio.wait_for` of Python 3.11 drops a cancellation that meets the event.

    Args:
        bell: What to wait for.
        timeout_s: None waits for ever.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await bell.wait()
    except TimeoutError:
        return False
