"""When a worker gives its signs of life."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from tokenmill.workers.jobs import JobTable
from tokenmill.workers.registration import Registration


def registered(table: JobTable) -> Registration:
    """A registration that only waits: nothing is sent."""
    nothing = cast("Any", None)
    return Registration(
        client=nothing,
        scripts=nothing,
        keys=nothing,
        spec=nothing,
        lease_ms=60_000,
        table=table,
        capacity=nothing,
        clock=nothing,
        outage=nothing,
        on_lost=nothing,
        on_cancelled=nothing,
    )


async def test_a_beat_follows_the_last_job_at_once() -> None:
    table = JobTable()
    table.empty.clear()
    waiting = asyncio.create_task(registered(table)._until_next(60.0))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done  # a job is in hand
    table.empty.set()
    await asyncio.wait_for(waiting, 5)


async def test_a_busy_worker_beats_at_its_interval() -> None:
    table = JobTable()
    table.empty.clear()
    await asyncio.wait_for(registered(table)._until_next(0.01), 5)
    assert not table.empty.is_set()  # it did not wait for the last job's end
