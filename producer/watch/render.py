"""Puts the parts of `tokenmill top` together for a terminal of a given size."""

import time
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...shared.watch.snapshot import PoolSnapshot
from . import tables
from .bars import sparkline
from .view import TopView

_GROUPS: Final = 12
"""Workers in the table at most; with more there is no room for anything else."""
_FEWEST_JOBS: Final = 3
_NAMED: Final = 72
"""Columns from which there is room for the name of what is shown."""


def render(
    view: TopView,
    *,
    width: int,
    height: int | None,
    utf8: bool = True,
    away: str | None = None,
) -> RenderableType:
    """Returns the whole screen.

    Args:
        view: What to show.
        width: Columns.
        height: Lines; None shows everything there is.
        utf8: Whether block characters can be shown.
        away: Why what is shown is old, if it is.
    """
    seen = view.snapshot
    parts: list[RenderableType] = [
        _head(view, width, utf8=utf8),
        *_warnings(seen, away),
        Text(),
        tables.queues(seen, width),
        Text(),
        tables.groups(seen, width, utf8=utf8, most=_GROUPS),
        Text(),
        tables.latencies(seen, width),
    ]
    if view.runs:
        parts += [Text(), tables.runs(view.runs, width)]
    parts.append(Text())
    room = len(view.jobs)
    if height is not None:
        taken = sum(_lines(part) for part in parts)
        room = max(_FEWEST_JOBS, height - taken - 2)
    parts.append(tables.jobs(view.jobs[:room], seen.at_ms, width))
    return Group(*parts)


def _lines(part: RenderableType) -> int:
    return part.row_count + 1 if isinstance(part, Table) else 1


def _head(view: TopView, width: int, *, utf8: bool) -> Text:
    seen, rates = view.snapshot, view.snapshot.rates
    clock = time.strftime("%H:%M:%S", time.localtime(seen.at_ms / 1000))
    line = Text(no_wrap=True, overflow="crop")
    if width >= _NAMED:
        line.append("tokenmill ", "bold")
    line.append(f"{clock}  ")
    line.append(f"{rates.tokens_per_s:.1f} tokens/s", "cyan")
    line.append(f"  {rates.jobs_per_s:.1f} jobs/s")
    if rates.failed_per_s:
        line.append(f"  {rates.failed_per_s:.1f} failed/s", "red")
    line.append(
        f"  {tables.number(seen.waiting_jobs)} waiting"
        f"  {tables.number(seen.leased)} held  {tables.number(seen.delayed)} delayed"
    )
    if seen.dead_letters:
        line.append(f"  {tables.number(seen.dead_letters)} dead", "red")
    rest = width - line.cell_len - 2
    hour = [sample.tokens_per_s for sample in view.history]
    if rest > 10 and (drawn := sparkline(hour, min(rest, 60), utf8=utf8)):
        line.append(f"  {drawn}", "cyan")
    return line


def _warnings(seen: PoolSnapshot, away: str | None) -> list[Text]:
    """What someone should do something about, a line each."""
    found: list[str] = []
    if away is not None:
        found.append(away)
    idle = [f"{s.model}:{s.partition}" for s in seen.schedulers if s.active is None]
    if idle:
        found.append(f"no active scheduler for {', '.join(idle[:4])}")
    silent = sum(group.state == "silent" for group in seen.groups)
    if silent:
        found.append(f"{silent} workers are silent")
    if seen.left_out:
        found.append(f"too many to show all: {', '.join(seen.left_out)}")
    return [Text(f"! {one}", "yellow", no_wrap=True, overflow="crop") for one in found]
