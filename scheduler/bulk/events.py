"""What terminal events mean for runs: which of their jobs have ended."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from ...shared.bulk.job_ids import place_of
from ...shared.keys import Keys
from ...shared.redis import translate
from ..events import DoneEvent
from .pool import BulkPool
from .results import Ended, let_go


def on_done(pool: BulkPool) -> Callable[[Keys, Sequence[DoneEvent]], Awaitable[None]]:
    """Returns the handler of terminal events; it may be given some again.

    Args:
        pool: The process's view of the pool.
    """

    async def handle(_keys: Keys, events: Sequence[DoneEvent]) -> None:
        runs: defaultdict[str, list[DoneEvent]] = defaultdict(list)
        for event in events:
            place = place_of(event.id)
            if place is not None:
                runs[place.run].append(event)
        for run, ended in runs.items():
            await _mark(pool, run, ended)

    return handle


async def _mark(pool: BulkPool, run: str, events: Sequence[DoneEvent]) -> None:
    writes = pool.writes(run)
    marked = await writes.mark_ended([event.id for event in events])
    if marked:
        await writes.mark_dirty()
    if marked == len(events):
        return
    # Of the others nobody waits for the result: their item settled without them.
    with translate():
        pipe = pool.client.pipeline(transaction=False)
        for event in events:
            pipe.sismember(writes.keys.open, event.id)
        flags = cast("list[int]", await pipe.execute())
    strays = [
        Ended(job_id=event.id, state=event.state)
        for event, is_open in zip(events, flags, strict=True)
        if not is_open
    ]
    await let_go(pool.client, strays, pool.job_keep_ms)
