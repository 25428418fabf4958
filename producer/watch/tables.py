"""The parts of `tokenmill top`, each a table that fits into a width."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from ...shared.watch.snapshot import GroupStatus, PoolSnapshot, QueueDepth
from ..cli_output import duration
from ..info import JobInfo
from .bars import stacked
from .fitting import Cell, fitted
from .view import RunRow

_FAINT: Final = "bright_black"
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


def _bucket_order(bucket: str) -> tuple[int, int]:
    return (0, int(bucket)) if bucket.isdigit() else (1, bucket == "resume")


def queues(seen: PoolSnapshot, width: int) -> Table:
    """Waiting jobs: a row for each model and class, a column for each bucket."""
    buckets = sorted({q.bucket for q in seen.queues}, key=_bucket_order)
    grouped: dict[tuple[str, str], list[QueueDepth]] = defaultdict(list)
    for queue in seen.queues:
        grouped[queue.model, queue.job_class or "(again)"].append(queue)
    rows: list[list[Cell]] = []
    for (model, job_class), found in sorted(grouped.items()):
        counts: dict[str, int] = defaultdict(int)
        for queue in found:
            counts[queue.bucket] += queue.jobs
        ages = [queue.oldest_ms for queue in found if queue.oldest_ms is not None]
        rows.append(
            [
                model,
                job_class,
                *(number(counts[b]) if counts[b] else "·" for b in buckets),
                number(sum(counts.values())),
                duration(max(ages)) if ages else "-",
            ]
        )
    return fitted(
        ("QUEUE", "CLASS", *buckets, "JOBS", "OLDEST"),
        rows,
        width,
        left=2,
        drop=(*buckets, "OLDEST"),
        empty=Text("nothing waits", style=_FAINT),
    )


def groups(seen: PoolSnapshot, width: int, *, utf8: bool, most: int) -> Table:
    """Workers: what runs, how full the KV pool is, how fast.

    Args:
        seen: The pool.
        width: Columns of the terminal.
        utf8: Whether block characters can be shown.
        most: Rows; those beyond are told as a number.
    """
    bar = max(6, min(24, width // 6))
    table = fitted(
        (
            *("WORKER", "MODEL", "RUNNING", "KV", "TOK/S"),
            *("STATE", "STEP", "HITS", "PREEMPT", "BEAT"),
        ),
        [_group(group, bar, utf8=utf8) for group in seen.groups[:most]],
        width,
        left=2,
        drop=("PREEMPT", "HITS", "STEP", "BEAT", "MODEL", "STATE"),
        short=lambda group: group[:10],
        empty=Text("no workers", style="red"),
    )
    if len(seen.groups) > most:
        table.add_row(Text(f"… {len(seen.groups) - most} more", style=_FAINT))
    return table


def _group(group: GroupStatus, bar: int, *, utf8: bool) -> list[Cell]:
    blocks = (group.used_blocks, group.cached_blocks, group.free_blocks)
    used = 100 * group.used_blocks / group.pool_blocks if group.pool_blocks else 0
    hits = group.prefix_hit_rate
    state = group.state if group.serves == "any" else f"{group.state} {group.serves}"
    if group.tp > 1:
        state += f" tp{group.tp}"
    return [
        group.group[:18],
        group.model,
        f"{group.running}/{group.max_running}",
        stacked(blocks, bar, utf8=utf8).append(f" {used:3.0f}%"),
        f"{group.tokens_per_s:.1f}",
        Text(state, style="green" if group.state == "ready" else "yellow"),
        milliseconds(group.step_ms),
        "-" if hits is None else f"{100 * hits:.0f}%",
        number(group.preemptions),
        duration(group.age_ms),
    ]


def latencies(seen: PoolSnapshot, width: int) -> Table:
    """Percentiles of what ended in the last five minutes, by class."""
    rows: list[list[Cell]] = []
    for name, found in seen.latency_by_class.items():
        if not found.jobs:
            continue
        first = (found.ttft_p50_ms, found.ttft_p95_ms, found.ttft_p99_ms)
        total = (found.total_p50_ms, found.total_p95_ms, found.total_p99_ms)
        rows.append(
            [f"{name} first token", number(found.jobs), *map(milliseconds, first)]
        )
        rows.append([f"{name} total", "", *map(milliseconds, total)])
    return fitted(
        ("LATENCY", "ENDED", "P50", "P95", "P99"),
        rows,
        width,
        drop=("ENDED", "P95"),
        empty=Text("nothing ended lately", style=_FAINT),
    )


def jobs(found: Sequence[JobInfo], now_ms: int, width: int) -> Table:
    """The newest jobs, newest first."""
    return fitted(
        ("JOB", "STATE", "CLASS", "TENANT", "PROMPT", "AGE", "FIRST", "TOOK"),
        [_job(job, now_ms) for job in found],
        width,
        left=4,
        drop=("PROMPT", "CLASS", "TENANT", "AGE"),
        short=lambda job_id: f"…{job_id[-12:]}",
        empty=Text("no jobs", style=_FAINT),
    )


def _job(job: JobInfo, now_ms: int) -> list[Cell]:
    enqueued = job.enqueued_ms or now_ms
    first, end = job.first_token_ms, job.finished_ms or now_ms
    return [
        job.id,
        Text(job.state, style=_STYLE.get(job.state, "")),
        job.job_class,
        job.tenant,
        number(job.prompt_tokens),
        duration(now_ms - enqueued),
        milliseconds(None if first is None else first - enqueued),
        duration(end - enqueued),
    ]


def runs(found: Sequence[RunRow], width: int) -> Table:
    """Bulk runs with their progress."""
    rows: list[list[Cell]] = []
    for row in found:
        total = "?" if row.total is None else number(row.total)
        rows.append(
            [
                row.run,
                row.state,
                f"{number(row.settled)}/{total}",
                Text(number(row.failed), style="red" if row.failed else ""),
                row.name[:24],
                number(row.tokens),
            ]
        )
    return fitted(
        ("BULK RUN", "STATE", "DONE", "FAILED", "NAME", "TOKENS"),
        rows,
        width,
        left=2,
        drop=("TOKENS", "NAME"),
        empty=Text("no runs", style=_FAINT),
    )
