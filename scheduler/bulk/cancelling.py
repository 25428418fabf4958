"""Ending a run on request: its jobs are cancelled and its items settle as cancelled."""

from typing import Final

from ...shared.bulk.job_ids import place_of
from ...shared.bulk.messages import Outcome
from ...shared.bulk.writes import NewOutcome, RunWrites
from ...shared.messages import CANCELLED
from .document_ends import cancel_jobs
from .items import standings
from .pool import BulkPool

MOST: Final = 256
"""Items in one turn."""


async def cancel_some(pool: BulkPool, writes: RunWrites) -> int:
    """Settles a bounded number of a run's items as cancelled.

    Args:
        pool: The process's view of the pool.
        writes: Of the run.

    Returns:
        How many were looked at; 0 when the run is cancelled.
    """
    opened: dict[int, list[str]] = {}
    for job_id in await writes.opened():
        place = place_of(job_id)
        if place is not None:
            opened.setdefault(place.seq, []).append(job_id)
    seqs = sorted({*opened, *(await writes.ready(MOST))})[:MOST]
    if not seqs:
        await writes.set_cancelled()
        return 0
    known = await standings(pool.client, writes.keys, seqs)
    gone = [seq for seq in seqs if seq not in known or not known[seq].is_going]
    await writes.not_ready(gone)
    await writes.forget([i for seq in gone for i in opened.get(seq, ())])
    outcomes = [
        NewOutcome(
            outcome=Outcome(
                seq=seq,
                generation=known[seq].generation,
                custom_id=item.custom_id if (item := known[seq].item) else "",
                state="cancelled",
                error=CANCELLED,
                job_ids=tuple(opened.get(seq, ())),
            ),
            open_ids=tuple(opened.get(seq, ())),
            count_usage=False,
        )
        for seq in seqs
        if seq not in gone
    ]
    await writes.settle(outcomes)
    await cancel_jobs(pool, [i for seq in seqs for i in opened.get(seq, ())])
    return len(seqs)
