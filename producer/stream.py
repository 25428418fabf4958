"""Following one job's output: the log for the past, the channel for the present."""

import asyncio
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self, cast

import msgspec

from ..shared.errors import InvalidRequest, ProtocolError, UnknownJob
from ..shared.keys import JobId
from ..shared.lifecycle import State
from ..shared.messages import Delta, End
from .assembler import Assembler, Fit, Position
from .inbox import SILENCE_S, Inbox
from .outcome import decode_delta, decode_result, failure, unending
from .session import Session

_PAGE: Final = 500
"""Log entries per read."""


class TokenStream:
    """An async iterator over a job's deltas: in order, without gap or repeat.

    Ends once, after the last delta: normally when the job succeeded, else by raising
    what `Job.result` would raise. Afterwards `end` says how it ended. Leaving early
    unsubscribes, at once inside `async with job.stream() as stream:`, otherwise when
    the iterator is dropped.

    Args:
        session: The client's connections.
        job_id: Whose output.
        from_offset: First token wanted, for every choice. Deltas are units, so the
            first one may begin before it.
        positions: Choice -> how far an earlier stream was read.
        cancel_on_leave: Cancel the job when the iteration is left before its end.
    """

    def __init__(
        self,
        session: Session,
        job_id: JobId,
        *,
        from_offset: int = 0,
        positions: Mapping[int, Position] | None = None,
        cancel_on_leave: bool = False,
    ) -> None:
        self._session = session
        self._id = job_id
        self._name = str(job_id)
        self._cancel_on_leave = cancel_on_leave
        self._channel = job_id.keys.wake(self._name).encode()
        self._assembler = Assembler(from_offset, positions)
        self._inbox = Inbox()
        self._ready: deque[Delta] = deque()
        self._last_entry = b"-"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._subscribed = False
        self._behind = True  # kept over a cancelled __anext__
        self._left = False

    @property
    def end(self) -> End | None:
        """How the job ended; None while it goes on."""
        return self._assembler.end

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._ready:
            if self._left:
                raise StopAsyncIteration
            if self.end is not None:
                self._unsubscribe()
                self._left = True
                error = failure(self._name, self.end.state, self.end.error)
                if error is not None:
                    raise error
                raise StopAsyncIteration
            await self._fetch_or_leave()
        return self._ready.popleft()

    async def begin(self) -> None:
        """Reads what is there already; iterating does so too, and gives it then.

        Raises:
            InvalidRequest: A position is none of this job's.
            UnknownJob: There is no record of the job.
            ProtocolError: The log cannot be read.
        """
        if self._behind and not self._left:
            await self._fetch_or_leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stops following; cancels the job if asked to and it has not ended."""
        if self._left:
            return
        self._left = True
        self._ready.clear()
        self._unsubscribe()
        if self._cancel_on_leave and self.end is None:
            await self._cancel()

    def __del__(self) -> None:
        # Reached by a `break` out of `async for`: nobody holds the iterator any more.
        loop = self._loop
        if self._left or loop is None or loop.is_closed():
            return
        self._left = True
        loop.call_soon_threadsafe(
            _leave,
            (self._session, self._channel, self._inbox),
            self._id if self._cancel_on_leave and self.end is None else None,
        )

    def _unsubscribe(self) -> None:
        if self._subscribed:
            self._subscribed = False
            self._session.listener.unsubscribe([self._channel], self._inbox)

    async def _cancel(self) -> None:
        scripts = self._session.scripts_of(self._id)
        await self._session.patiently(lambda: scripts.cancel(self._name))

    async def _fetch_or_leave(self) -> None:
        try:
            await self._fetch()
        except (InvalidRequest, ProtocolError, UnknownJob):
            self._left = True
            self._unsubscribe()
            raise

    async def _fetch(self) -> None:
        """Moves the next deltas, from wherever they are, to `_ready`."""
        if not self._subscribed:
            self._loop = asyncio.get_running_loop()
            await self._session.subscribe([self._channel], self._inbox)
            self._subscribed = True
        if not self._behind:
            messages = await self._inbox.take(SILENCE_S)
            self._behind = messages is None or not self._add_messages(messages)
        if self._behind:
            await self._catch_up()
            self._behind = False

    def _add_messages(self, messages: list[bytes]) -> bool:
        """Takes live messages; False when the log must fill a gap first."""
        for message in messages:
            fit, delta = self._assembler.add(decode_delta(message))
            if fit is Fit.AHEAD:
                return False
            if delta is not None:
                self._ready.append(delta)
        return not self._misses_tokens()

    def _misses_tokens(self) -> bool:
        end = self.end
        return (
            end is not None
            and end.state == State.SUCCEEDED
            and self._assembler.num_tokens < end.usage.completion_tokens
        )

    async def _catch_up(self) -> None:
        """Reads the log after the last entry read, and the result if there is one."""
        raw_result = await self._read_log()
        if self.end is None and raw_result is not None:
            # It ended between the two reads, or the log does not hold the end.
            raw_result = await self._read_log() or raw_result
        if self._assembler.has_strays:
            result = None if raw_result is None else decode_result(raw_result)
            self._assembler.check_positions(result, has_log=self._last_entry != b"-")
        if raw_result is not None and (self.end is None or self._misses_tokens()):
            self._ready.extend(self._assembler.complete(decode_result(raw_result)))

    async def _read_log(self) -> bytes | None:
        keys = self._id.keys
        log, record = keys.log(self._name), keys.job(self._name)
        while True:
            state, entries, raw_result = await self._session.read(
                ("HGET", record, "state"),  # before the result, which it implies
                ("XRANGE", log, self._after_last(), "+", "COUNT", _PAGE),
                ("GET", keys.output(self._name)),
            )
            for entry_id, fields in entries:
                self._last_entry = entry_id
                self._add_entry(fields)
            if len(entries) < _PAGE:
                break
        if raw_result is None and self.end is None:
            problem = unending(self._name, state)
            if problem is not None:
                raise problem
        return cast("bytes | None", raw_result)

    def _after_last(self) -> bytes:
        return self._last_entry if self._last_entry == b"-" else b"(" + self._last_entry

    def _add_entry(self, fields: dict[bytes, bytes]) -> None:
        raw = fields.get(b"d")
        if raw is None:
            return  # a fence: the job was taken from a worker
        fit, delta = self._assembler.add(decode_delta(raw))
        if fit is Fit.AHEAD:
            raise ProtocolError(
                f"job {self._name}: the log has a gap before {msgspec.json.decode(raw)}"
            )
        if delta is not None:
            self._ready.append(delta)


def _leave(subscription: tuple[Session, bytes, Inbox], cancel: JobId | None) -> None:
    session, channel, inbox = subscription
    session.listener.unsubscribe([channel], inbox)
    if cancel is not None:
        session.start(session.scripts_of(cancel).cancel(str(cancel)))
