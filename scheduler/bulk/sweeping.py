"""The truth about open runs, looked at directly: events may have been missed."""

from collections.abc import Sequence
from typing import Final

import structlog

from ...shared.bulk.job_ids import place_of
from ...shared.bulk.keys import RUN_ID, RUNS
from ...shared.bulk.messages import RunView
from ...shared.bulk.store import look, pass_over
from ...shared.bulk.writes import RunWrites
from ...shared.errors import ProtocolError
from ...shared.lifecycle import TERMINAL
from ...shared.redis import translate
from ...shared.script_runner import text
from .announcing import announce_end
from .pool import BulkPool
from .results import states

PAGE: Final = 500
"""Jobs asked for in one round trip."""
RENEW_PART: Final = 8
"""Items of a run whose driver lives are renewed after this part of their life."""
_log = structlog.get_logger(__name__)


async def sweep(pool: BulkPool) -> int:
    """Looks at every run that is not over.

    Jobs that ended are marked so, jobs that Redis does not know are to be sent again,
    runs that have expired leave the index.

    Args:
        pool: The process's view of the pool.

    Returns:
        How many runs are open.
    """
    with translate():
        names = [text(one) for one in await pool.client.zrange(RUNS, 0, -1)]
    runs = [name for name in names if RUN_ID.fullmatch(name)]
    num_open = 0
    for first in range(0, len(runs), PAGE):
        part = runs[first : first + PAGE]
        for run, view in zip(part, await look(pool.client, part), strict=True):
            if isinstance(view, ProtocolError):
                pass_over(run, view)
            elif view is None:
                await pool.client.zrem(RUNS, run)
                _log.info("bulk_run_forgotten", run=run)
            elif view.state in ("open", "cancelling") or view.open_jobs:
                num_open += 1
                await _sweep_run(pool, view)
            else:
                await announce_end(pool, run)
    return num_open


async def _sweep_run(pool: BulkPool, view: RunView) -> None:
    writes = pool.writes(view.run)
    opened = await writes.opened()
    marked = 0
    for first in range(0, len(opened), PAGE):
        part = opened[first : first + PAGE]
        known = await states(pool.client, part)
        pairs = list(zip(part, known, strict=True))
        marked += await writes.mark_ended([i for i, s in pairs if s in TERMINAL])
        marked += await writes.mark_unsent([i for i, s in pairs if not s])
    if marked or view.ready_items or view.state == "cancelling":
        await writes.mark_dirty()
    await _renew(pool, writes, view, opened)


async def _renew(
    pool: BulkPool, writes: RunWrites, view: RunView, opened: Sequence[str]
) -> None:
    """Items wait as long as their driver lives, however long that is."""
    is_driven = view.now_ms - view.driver_ms < pool.keep_ms
    if not is_driven or view.now_ms - view.renewed_ms < pool.keep_ms // RENEW_PART:
        return
    keys = writes.keys
    with translate():
        ready = await pool.client.zrange(keys.ready, 0, -1)
        seqs = {int(one) for one in ready}
        seqs |= {place.seq for i in opened if (place := place_of(i)) is not None}
        pipe = pool.client.pipeline(transaction=False)
        for name in map(keys.item, sorted(seqs)):
            pipe.pexpire(name, pool.keep_ms)
        await pipe.execute()
    await writes.set_renewed()
