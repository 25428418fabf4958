"""The bell: something arrived, or room was made."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import redis.asyncio

MOST_ARRIVALS: Final = 16
LONGEST: Final = 4096
SILENCE_S: Final = 10.0
"""After this long without a message the connection is checked."""


class Ring(msgspec.Struct, frozen=True):
    """One message of the bell."""

    word: str
    arrivals: tuple[tuple[str, str], ...] = ()
    """Class and id of jobs that have just come, where they are few."""


class Bell(asyncio.Event):
    """Wakes one part of the scheduler, unless the cause is none of its business.

    Args:
        concerns: Tells by the message; None: every ring matters.
    """

    def __init__(self, concerns: Callable[[Ring], bool] | None = None) -> None:
        super().__init__()
        self._concerns = concerns

    def ring(self, ring: Ring) -> None:
        """Sets the event if this message matters."""
        if self._concerns is None or self._concerns(ring):
            self.set()


def parse_ring(data: bytes) -> Ring:
    """Reads a message; whatever a stranger may have sent is a ring."""
    word, *rest = data[:LONGEST].decode(errors="replace").split(" ")
    pairs = [part.partition(":") for part in rest[:MOST_ARRIVALS]]
    return Ring(word, tuple((kind, name) for kind, _, name in pairs if name))


async def listen(
    client: "redis.asyncio.Redis", channel: str, bells: Sequence[Bell]
) -> None:
    """Rings every bell at each message, until cancelled.

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
                told = message["type"] == "message"
                ring = parse_ring(message["data"] if told else b"")
                for bell in bells:
                    bell.ring(ring)


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
