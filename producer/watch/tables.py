"""The parts of `tokenmill top`, each a table that fits into a width."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from ...shared.watch.snapshot import GroupStatus, Latency, PoolSnapshot, QueueDepth
from ..cli_output import duration
from ..info import JobInfo
from .bars import stacked
from .view import RunRow

NARROW: Final = 72
"""Columns below which only the most wanted cells are shown."""
_STYLE: Final = {
    "succeeded": "green",
    "running": "cyan",
    "dispatched": "cyan",
    "failed": "red",
    "expired": "yellow",
    "cancelled": "yellow",
    "retrying": "yellow",
}


def number(value: float) -> str:
    """A count in few characters: `950`, `12.3k`, `4.5M`."""
    for limit, factor, unit in ((1e4, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit:
            scaled = value / factor
            return f"{scaled:.0f}{unit}" if not unit else f"{scaled:.1f}{unit}"
    return f"{value / 1e9:.1f}G"


def milliseconds(value: float | None) -> str:
    """A latency; `-` where nothing tells it."""
    if value is None:
        return "-"
    return f"{value:.0f}ms" if value < 10_000 else duration(value)


def _table(*header: str, left: int = 1) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for index, name in enumerate(header):
        table.add_column(
            name, justify="left" if index < left else "right", no_wrap=True
        )
    return table


def _bucket_order(bucket: str) -> tuple[int, int]:
    return (0, int(bucket)) if bucket.isdigit() else (1, bucket == "resume")


def queues(seen: PoolSnapshot, *, narrow: bool) -> Table:
    """Waiting jobs: a row for each model and class, a column for each bucket."""
    buckets = sorted({q.bucket for q in seen.queues}, key=_bucket_order)
    shown = [] if narrow else buckets
    table = _table("QUEUE", "CLASS", *shown, "JOBS", "OLDEST", left=2)
    rows: dict[tuple[str, str], list[QueueDepth]] = defaultdict(list)
    for queue in seen.queues:
        rows[queue.model, queue.job_class or "(again)"].append(queue)
    for (model, job_class), found in sorted(rows.items()):
        counts: dict[str, int] = defaultdict(int)
        for queue in found:
            counts[queue.bucket] += queue.jobs
        ages = [queue.oldest_ms for queue in found if queue.oldest_ms is not None]
        table.add_row(
            model,
            job_class,
            *(number(counts[bucket]) if counts[bucket] else "·" for bucket in shown),
            number(sum(counts.values())),
            duration(max(ages)) if ages else "-",
        )
    if not rows:
        table.add_row(Text("nothing waits", style="bright_black"))
    return table


def groups(seen: PoolSnapshot, width: int, *, utf8: bool, most: int) -> Table:
    """Workers: what runs, how full the KV pool is, how fast.

    Args:
        seen: The pool.
        width: Columns of the terminal.
        utf8: Whether block characters can be shown.
        most: Rows; those beyond are told as a number.
    """
    narrow = width < NARROW
    extra = () if narrow else ("STATE", "STEP", "HITS", "PREEMPT", "BEAT")
    bar = max(6, min(24, width // 6))
    table = _table("WORKER", "MODEL", "RUNNING", "KV", "TOK/S", *extra, left=2)
    for group in seen.groups[:most]:
        table.add_row(*_group(group, bar, narrow=narrow, utf8=utf8))
    if not seen.groups:
        table.add_row(Text("no workers", style="red"))
    elif len(seen.groups) > most:
        table.add_row(Text(f"… {len(seen.groups) - most} more", style="bright_black"))
    return table


def _group(
    group: GroupStatus, bar: int, *, narrow: bool, utf8: bool
) -> list[str | Text]:
    blocks = (group.used_blocks, group.cached_blocks, group.free_blocks)
    used = 100 * group.used_blocks / group.pool_blocks if group.pool_blocks else 0
    kv = stacked(blocks, bar, utf8=utf8).append(f" {used:3.0f}%")
    cells: list[str | Text] = [
        group.group[:18],
        group.model,
        f"{group.running}/{group.max_running}",
        kv,
        f"{group.tokens_per_s:.1f}",
    ]
    if narrow:
        return cells
    hits = group.prefix_hit_rate
    state = group.state if group.serves == "any" else f"{group.state} {group.serves}"
    return [
        *cells,
        Text(state, style="green" if group.state == "ready" else "yellow"),
        milliseconds(group.step_ms),
        "-" if hits is None else f"{100 * hits:.0f}%",
        number(group.preemptions),
        duration(group.age_ms),
    ]


def latencies(seen: PoolSnapshot) -> Table:
    """Percentiles of what ended in the last five minutes, by class."""
    table = _table("LATENCY", "ENDED", "P50", "P95", "P99")
    rows: list[tuple[str, Latency]] = list(seen.latency_by_class.items())
    for name, found in rows:
        if not found.jobs:
            continue
        first = (found.ttft_p50_ms, found.ttft_p95_ms, found.ttft_p99_ms)
        total = (found.total_p50_ms, found.total_p95_ms, found.total_p99_ms)
        table.add_row(
            f"{name} first token", number(found.jobs), *map(milliseconds, first)
        )
        table.add_row(f"{name} total", "", *map(milliseconds, total))
    if not table.row_count:
        table.add_row(Text("nothing ended lately", style="bright_black"))
    return table


def jobs(found: Sequence[JobInfo], now_ms: int, *, narrow: bool) -> Table:
    """The newest jobs, newest first."""
    extra = () if narrow else ("CLASS", "TENANT", "PROMPT")
    table = _table(
        "JOB", "STATE", *extra, "AGE", "FIRST", "TOOK", left=2 if narrow else 4
    )
    for job in found:
        enqueued = job.enqueued_ms or now_ms
        first, end = job.first_token_ms, job.finished_ms or now_ms
        cells: list[str | Text] = [
            job.id if not narrow else f"…{job.id[-12:]}",
            Text(job.state, style=_STYLE.get(job.state, "")),
        ]
        if not narrow:
            cells += [job.job_class, job.tenant, number(job.prompt_tokens)]
        table.add_row(
            *cells,
            duration(now_ms - enqueued),
            milliseconds(None if first is None else first - enqueued),
            duration(end - enqueued),
        )
    if not found:
        table.add_row(Text("no jobs", style="bright_black"))
    return table


def runs(found: Sequence[RunRow], *, narrow: bool) -> Table:
    """Bulk runs with their progress."""
    extra = () if narrow else ("NAME", "TOKENS")
    table = _table("BULK RUN", "STATE", "DONE", "FAILED", *extra, left=2)
    for row in found:
        total = "?" if row.total is None else number(row.total)
        cells: list[str | Text] = [
            row.run,
            row.state,
            f"{number(row.settled)}/{total}",
            Text(number(row.failed), style="red" if row.failed else ""),
        ]
        if not narrow:
            cells += [row.name[:24], number(row.tokens)]
        table.add_row(*cells)
    return table
