"""Cancels that reach a worker at once, over its control channel."""

from collections.abc import Callable
from typing import Final

import redis.asyncio

from ..shared.outage import REDIS_ERRORS, Backoff, Outage
from .jobs import JobTable, RunningJob

_POLL_S: Final = 30.0
"""A read that long with no message is no fault; it only bounds one wait."""


class Control:
    """Listens on `ctl:<group>`; what is missed there comes with the next renewal.

    Args:
        client: Redis.
        channel: Name of the control channel.
        table: Jobs in hand.
        outage: Shared state of the connection.
        on_cancelled: Called with a job that somebody has cancelled.
    """

    def __init__(
        self,
        *,
        client: "redis.asyncio.Redis",
        channel: str,
        table: JobTable,
        outage: Outage,
        on_cancelled: Callable[[RunningJob], None],
    ) -> None:
        self._client = client
        self._channel = channel
        self._table = table
        self._outage = outage
        self._on_cancelled = on_cancelled

    async def run(self) -> None:
        """Listens until it is cancelled."""
        backoff = Backoff()
        while True:
            try:
                await self._listen(backoff)
            except REDIS_ERRORS as error:
                self._outage.failed("control", error)
                await backoff.wait()

    async def _listen(self, backoff: Backoff) -> None:
        async with self._client.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(self._channel)
            while True:
                message = await channel.get_message(timeout=_POLL_S)
                backoff.reset()
                if message is not None:
                    self._handle(message["data"])

    def _handle(self, data: bytes) -> None:
        job = self._table.get(data.decode(errors="replace"))
        if job is not None and not job.closing:
            self._on_cancelled(job)
