"""Single submits that come at the same time, sent as one call."""

import asyncio
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ..shared.errors import TokenmillError
from ..shared.script_types import EnqueueReply, NewJob
from ..shared.tasks import end_tasks

if TYPE_CHECKING:
    from .session import Session

CALL_JOBS: Final = 200
"""Jobs per call of the script: it blocks Redis for a few milliseconds at most."""
CALL_BYTES: Final = 1024 * 1024
"""Payload per call, for the same reason, unless one job alone has more."""

_Waiting = list[tuple[NewJob, "asyncio.Future[EnqueueReply]"]]


class Grouping:
    """Enqueues jobs of many callers in few calls.

    What is asked for within one turn of the event loop goes together. Each caller gets
    the reply, or the error, of its own job; one that is cancelled takes nobody along.

    Args:
        session: The client's connections.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._waiting: dict[tuple[str, int], _Waiting] = {}
        self._sending: dict[asyncio.Task[None], _Waiting] = {}

    async def enqueue(self, job: NewJob) -> EnqueueReply:
        """Enqueues one job, together with others of its shard.

        Raises:
            RedisUnavailable: Redis did not answer for longer than the patience.
            RedisUnsuitable: It answered that it cannot be used.
        """
        loop = asyncio.get_running_loop()
        shard = (job.id.model, job.id.partition)
        waiting = self._waiting.get(shard)
        if waiting is None:
            waiting = self._waiting[shard] = []
            loop.call_soon(self._flush, shard)
        future: asyncio.Future[EnqueueReply] = loop.create_future()
        waiting.append((job, future))
        return await future

    def _flush(self, shard: tuple[str, int]) -> None:
        for waiting in _calls(self._waiting.pop(shard, [])):
            task = asyncio.ensure_future(self._send(waiting))
            self._sending[task] = waiting
            task.add_done_callback(self._sending.pop)

    async def _send(self, waiting: _Waiting) -> None:
        wanted = [(job, future) for job, future in waiting if not future.done()]
        jobs = [job for job, _ in wanted]
        if not jobs:
            return
        scripts = self._session.scripts_of(jobs[0].id)
        try:
            # A call whose reply was lost is repeated: what it had recorded comes back
            # as a duplicate of itself.
            replies = await self._session.patiently(lambda: scripts.enqueue(jobs))
        except Exception as error:  # noqa: BLE001 - raised where each caller waits
            _fail(wanted, error)
            return
        for (_, future), reply in zip(wanted, replies, strict=True):
            if not future.done():
                future.set_result(reply)

    async def close(self) -> None:
        """Ends what is on its way; its callers are told."""
        closed = TokenmillError("the client was closed during the call")
        sending = dict(self._sending)
        await end_tasks(*sending)
        # Here and not in the tasks: one that is cancelled before it began runs nothing.
        for waiting in (*sending.values(), *self._waiting.values()):
            _fail(waiting, closed)
        self._waiting.clear()


def _calls(waiting: _Waiting) -> Iterator[_Waiting]:
    """Parts what waits by number and bytes, in order."""
    part: _Waiting = []
    size = 0
    for one in waiting:
        size += len(one[0].payload)
        if part and (len(part) >= CALL_JOBS or size > CALL_BYTES):
            yield part
            part, size = [], len(one[0].payload)
        part.append(one)
    if part:
        yield part


def _fail(wanted: _Waiting, error: Exception) -> None:
    for _, future in wanted:
        if not future.done():
            # Each raises its own: what a caller notes on an error is not for others.
            future.set_exception(copy.copy(error))
