"""What `tokenmill top` shows at one moment, as one record."""

from typing import TYPE_CHECKING, Final

import msgspec

from ...shared.watch.snapshot import HistorySample, PoolSnapshot
from ..info import JobInfo

if TYPE_CHECKING:
    from ..client import Client

JOBS: Final = 40
"""Newest jobs that are read; a terminal shows as many as it has lines for."""
RUNS: Final = 8


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A bulk run in a line."""

    run: str
    name: str
    state: str
    settled: int
    total: int | None
    failed: int
    """Refused lines of the input among them."""
    tokens: int
    """Output tokens so far."""


class TopView(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot and what stands beside it."""

    snapshot: PoolSnapshot
    history: tuple[HistorySample, ...] = ()
    """The last hour, oldest first; empty without a janitor."""
    jobs: tuple[JobInfo, ...] = ()
    """Newest first."""
    runs: tuple[RunRow, ...] = ()
    """Bulk runs, newest first."""


async def look(mill: "Client", *, jobs: int = JOBS) -> TopView:
    """Returns everything that is shown, with a bound whatever the pool holds.

    Args:
        mill: An open client.
        jobs: Most jobs to list.
    """
    from ...shared.bulk.store import list_runs

    runs = await list_runs(mill.session.redis, limit=RUNS)
    return TopView(
        snapshot=await mill.snapshot(),
        history=tuple(await mill.history()),
        jobs=tuple(await mill.jobs(jobs)) if jobs else (),
        runs=tuple(
            RunRow(
                run=view.run,
                name=view.spec.name,
                state=str(view.state),
                settled=view.settled + view.refused,
                total=None if view.total is None else view.total + view.refused,
                failed=view.failed + view.refused,
                tokens=view.completion_tokens,
            )
            for view in runs
        ),
    )
