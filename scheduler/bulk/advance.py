"""One bounded pass over a run: what ended is recorded, what is ready is sent.

Nothing here waits: what cannot go on now is left in Redis, where the next pass, of this
process or another, finds it. Every write is safe to repeat, so that a pass may break
off anywhere.
"""

import time
from collections.abc import Sequence
from typing import Final, Protocol

import structlog

from ...shared.bulk.keys import DIRTY, RUNS
from ...shared.bulk.messages import RunView
from ...shared.bulk.store import views
from ...shared.bulk.writes import RunWrites
from .announcing import announce_end
from .cancelling import cancel_some
from .documents import Documents
from .pool import BulkPool
from .requests import Requests
from .results import Ended, read_ended
from .sending import Sent

PASS_JOBS: Final = 256
"""Most jobs recorded, and most opened, in one turn."""
PASS_S: Final = 1.0
"""A pass takes no further turns after this long: other runs are to have theirs."""
LONGEST_PAUSE_S: Final = 2.0
"""Between two tries while the queue is full: room may come before the estimate."""
_log = structlog.get_logger(__name__)


class Kind(Protocol):
    """What differs between kinds of runs."""

    async def record(self, ended: Sequence[Ended]) -> int:
        """Takes jobs that have ended."""
        ...

    async def start(self, seqs: Sequence[int], room: int) -> Sent:
        """Opens and sends jobs of items that are ready."""
        ...

    async def resend(self, job_ids: Sequence[str]) -> Sent:
        """Enqueues open jobs that may not be in the queue."""
        ...


async def advance(pool: BulkPool, run: str) -> float | None:
    """Does what there is to do for a run, for a second or so.

    Args:
        pool: The process's view of the pool.
        run: Its id.

    Returns:
        Seconds after which to go on; None when there is nothing to do until something
        happens.
    """
    writes = pool.writes(run)
    # First: what happens from here on makes it dirty again.
    await pool.client.srem(DIRTY, run)  # type: ignore[misc]
    end = time.monotonic() + PASS_S
    while True:
        (view,) = await views(pool.client, [run])
        if view is None:
            await pool.client.zrem(RUNS, run)
            return None
        turn = await _turn(pool, writes, view)
        if not turn.moved or turn.pause_s is not None or time.monotonic() > end:
            await announce_end(pool, run)
            return turn.pause_s if turn.pause_s is not None else turn.again_s


class _Turn:
    """What one turn did."""

    def __init__(self) -> None:
        self.moved = 0
        self.pause_s: float | None = None

    @property
    def again_s(self) -> float | None:
        return 0.0 if self.moved else None

    def note(self, sent: Sent) -> None:
        """A full queue pauses the run, but not what it has to record."""
        if sent.retry_after_s is not None:
            self.pause_s = min(sent.retry_after_s, LONGEST_PAUSE_S)


async def _turn(pool: BulkPool, writes: RunWrites, view: RunView) -> _Turn:
    turn, kind = _Turn(), _kind(pool, writes, view)
    turn.moved += await _record(pool, writes, kind)
    if view.state == "cancelling":
        turn.moved += await cancel_some(pool, writes)
        return turn
    if view.state == "cancelled":
        return turn
    unsent = await writes.unsent(PASS_JOBS)
    if unsent:
        turn.note(await kind.resend(unsent))
        turn.moved += len(unsent) if turn.pause_s is None else 0
    room = pool.config.bulk.max_open_jobs - view.open_jobs
    if turn.pause_s is None and room > 0:
        seqs = await writes.ready(PASS_JOBS)
        if seqs:
            sent = await kind.start(seqs, min(room, PASS_JOBS))
            turn.note(sent)
            turn.moved += sent.moved
    return turn


def _kind(pool: BulkPool, writes: RunWrites, view: RunView) -> Kind:
    made = Requests if view.spec.kind == "run" else Documents
    return made(pool, writes, view.spec)


async def _record(pool: BulkPool, writes: RunWrites, kind: Kind) -> int:
    """Takes the jobs that are said to have ended; how many were looked at."""
    said = await writes.ended(PASS_JOBS)
    if not said:
        return 0
    found = await read_ended(pool.client, said)
    ended = [one for one in found if one.is_terminal]
    lost = [one.job_id for one in found if not one.state]
    if lost:
        # Redis forgot them, as after a crash without an append-only file.
        _log.warning("bulk_jobs_lost", run=writes.keys.run, jobs=len(lost))
        await writes.mark_unsent(lost)
    await writes.not_ended([one.job_id for one in found if not one.is_terminal])
    await kind.record(ended)
    return len(said)
