"""What reaches a worker at once, over its control channel: cancels, and checks of
adapters that are to be registered.
"""

from collections.abc import Callable
from typing import Final

import redis.asyncio

from ..shared.adapters import CHECK
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
        on_check: Called with the id of a check that somebody waits for.
    """

    def __init__(
        self,
        *,
        client: "redis.asyncio.Redis",
        channel: str,
        table: JobTable,
        outage: Outage,
        on_cancelled: Callable[[RunningJob], None],
        on_check: Callable[[str], None] | None = None,
    ) -> None:
        self._client = client
        self._channel = channel
        self._table = table
        self._outage = outage
        self._on_cancelled = on_cancelled
        self._on_check = on_check

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
        word = data.decode(errors="replace")
        if word.startswith(CHECK):
            if self._on_check is not None:
                self._on_check(word.removeprefix(CHECK))
            return
        job = self._table.get(word)
        if job is not None and not job.closing:
            self._on_cancelled(job)
