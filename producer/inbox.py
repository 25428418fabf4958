"""What a watcher keeps between two looks: bounded, and honest about loss."""

import asyncio
from collections import deque
from typing import Final, Protocol

SILENCE_S: Final = 5.0
"""With nothing heard for this long, the connection is probed and watchers look at
the log themselves."""
MAX_MESSAGES: Final = 1024
"""A consumer further behind than this reads the log instead: memory stays bounded
and nothing is lost."""


class Watcher(Protocol):
    """Someone who waits for messages on one or more channels."""

    def deliver(self, channel: bytes, data: bytes) -> None:
        """A message arrived; called on the event loop, must not raise."""

    def interrupted(self) -> None:
        """Messages may have been lost: what counts now is the log."""


class Inbox:
    """Messages of one channel for one consumer."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._complete = True
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, channel: bytes, data: bytes) -> None:  # noqa: ARG002
        """Keeps a message, or notes that there were too many."""
        if len(self._messages) >= MAX_MESSAGES:
            self._messages.clear()
            self._complete = False
        if self._complete:
            self._messages.append(data)
        self._wake()

    def interrupted(self) -> None:
        """Notes that messages may have been lost."""
        self._messages.clear()
        self._complete = False
        self._wake()

    async def take(self, timeout_s: float) -> list[bytes] | None:
        """Waits for messages.

        Args:
            timeout_s: Seconds to wait for the first.

        Returns:
            All messages so far, in order; None when none came in time or when some
            were lost: the log knows more.
        """
        if self._complete and not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._waiter
            except TimeoutError:
                return None
            finally:
                self._waiter = None
        if not self._complete:
            # From here on messages count again: whoever reads the log now sees
            # everything up to them.
            self._complete = True
            self._messages.clear()
            return None
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EndInbox:
    """Channels, of many, whose job has ended."""

    def __init__(self) -> None:
        self._channels: dict[bytes, None] = {}
        self._complete = True
        self._waiter: asyncio.Event = asyncio.Event()

    def deliver(self, channel: bytes, data: bytes) -> None:
        """Notes the channel when the message may be the last of its job."""
        # Quotes inside JSON strings are escaped, so text seldom looks like this; a
        # false alarm costs one look at a result that is not there yet.
        if b'"end"' in data:
            self._channels[channel] = None
            self._waiter.set()

    def interrupted(self) -> None:
        """Notes that ends may have been missed."""
        self._complete = False
        self._waiter.set()

    async def take(self, timeout_s: float) -> list[bytes] | None:
        """Waits for ends.

        Args:
            timeout_s: Seconds to wait for the first.

        Returns:
            Channels in order of their end; None when nothing came in time or when
            ends may have been missed: the results know more.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._waiter.wait()
        except TimeoutError:
            return None
        self._waiter.clear()
        complete, self._complete = self._complete, True
        channels = list(self._channels)
        self._channels.clear()
        return channels if complete else None
