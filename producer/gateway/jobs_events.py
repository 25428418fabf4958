"""A job's stream as events that can be gone on with from any of them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from ...shared.errors import InvalidRequest, JobFailed, RedisUnavailable
from ...shared.messages import Delta, encode
from .sse import Source, event

if TYPE_CHECKING:
    from ..job import Job
    from ..stream import TokenStream
    from .context import Gateway
    from .jobs_cursor import Cursor

_RETRY: Final = b"retry: 1000\n\n"
"""Milliseconds after which a browser comes back."""


async def job_events(
    owner: "Gateway",
    job: "Job",
    cursor: "Cursor",
    *,
    from_offset: int = 0,
    cancel_on_leave: bool = False,
) -> Source:
    """Yields a job's deltas, then its end.

    Args:
        owner: The gateway.
        job: Whose output.
        cursor: What the client has had; it moves on.
        from_offset: Deltas are left out that lie wholly before this token.
        cancel_on_leave: Cancel the job when the client leaves before its end.

    Raises:
        InvalidRequest: Before the first event: no event of this job has such an id.
    """
    stream = job.stream(positions=cursor.positions)
    try:
        if cursor.positions:
            # Where that cannot be said now, the stream begins and says what is wrong:
            # a browser comes back after a stream that broke off, but after no refusal.
            with suppress(RedisUnavailable):
                await stream.begin()
        yield _RETRY
        async with aclosing(_until_failed(stream)) as deltas:
            async for delta in deltas:
                event_id = cursor.advance(delta)
                if delta.offset + len(delta.token_ids) > from_offset or _ends(delta):
                    told = msgspec.structs.replace(delta, end=None)
                    yield event(encode(told), id=event_id)
        assert stream.end is not None
        yield event(encode(stream.end), id=cursor.end(), kind="end")
    except InvalidRequest as error:
        cancel_on_leave = False  # who is refused has not left
        raise InvalidRequest(cursor.field, error.problem) from None
    finally:
        await stream.aclose()
        # A gateway that goes away is no client that leaves: another one serves on.
        is_ours = owner.draining.is_set() or owner.leaving.is_set()
        if cancel_on_leave and stream.end is None and not is_ours:
            await job.cancel()


async def _until_failed(stream: "TokenStream") -> AsyncGenerator[Delta, None]:
    """The deltas; how the job ended stands in `stream.end`, well or not."""
    try:
        async for delta in stream:
            yield delta
    except JobFailed:
        return


def _ends(delta: Delta) -> bool:
    return delta.finish_reason is not None
