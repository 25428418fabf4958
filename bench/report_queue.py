"""Sections of docs/benchmarks.md on the queue: throughput, subscribers, scale, soak."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Result = dict[str, Any]
Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]
Section = tuple[str, Callable[[Result, Table], str]]
CHANGES = {
    "dispatched_per_s": "jobs dispatched/s",
    "scheduler_us_per_job": "scheduler, µs of processor a job",
    "plan_us_per_job": "plan, µs of processor a job",
    "redis_us_per_job": "Redis, µs of processor a job",
    "plan_p50_ms": "plan, P50, ms",
    "step_p50_ms": "plan and dispatch, P50, ms",
    "read_p50_ms": "reading, P50, ms",
    "idle_cpu_percent": "scheduler without a worker, % of a core",
    "scheduler_rss_mib": "scheduler, resident MiB",
    "redis_bytes_per_job": "Redis, bytes a job with its payload",
    "enqueue_last_per_s": "enqueued/s",
}


def best(turns: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The turn with the highest rate."""
    return max(turns, key=lambda turn: float(turn["jobs_per_s"]))


def queue(result: Result, table: Table) -> str:
    """The full path beside other queues."""
    target = result["targets"]["ratio"]
    rows = []
    for name, turns in result["sides"].items():
        one, by = best(turns), result["comparisons"].get(name, {})
        ratio = by.get("ratio")
        rows.append(
            (
                name,
                one["jobs_per_s"],
                one["cpu_us_per_job_in_all"],
                ratio,
                by.get("ratio_of_processed"),
                by.get("cpu_ratio"),
                None if ratio is None else ratio >= target,
            )
        )
    header = ("side", "jobs/s", "µs of processor a job", "ratio", "to no results read")
    parts = {name: turn["cpu_us_per_job"] for name, turn in mine(result)}
    text = (
        "Jobs that echo a short text, from before the first submit until the last "
        "result is read back and compared. Each side has a Redis of its own with the "
        f"same settings and as many processes; best of {result_turns(result)} turns, "
        f"one side after the other. Target: {target:.0f} times each peer. The ratio to "
        "no results read compares with the peer when nobody reads its results. "
        f"At 50 jobs/s a job's end is heard after {result.get('p50_ms', '-')} ms (P50) "
        f"and {result.get('p99_ms', '-')} ms (P99).\n"
    )
    cells = table((*header, "ratio by processor", "met"), rows)
    cpu = table(
        ("µs of processor a job", *parts["tokenmill"]),
        [("tokenmill", *parts["tokenmill"].values())],
    )
    absent = [f"{name}: {why}.\n" for name, why in result["not_installed"].items()]
    return "\n".join((text, cells, cpu, *absent))


def mine(result: Result) -> list[tuple[str, Mapping[str, Any]]]:
    """The best turn of every side, by name."""
    return [(name, best(turns)) for name, turns in result["sides"].items()]


def result_turns(result: Result) -> int:
    """How many turns every side had."""
    return len(result["sides"]["tokenmill"])


def subscribers(result: Result, table: Table) -> str:
    """Delay of tokens at many subscribers."""
    columns = ("deliveries", "p50_ms", "p99_ms", "max_ms")
    more = ("connections_of_subscribers", "clients_rss_mib")
    rows = [
        (title, *(result[key][column] for column in (*columns, *more)))
        for title, key in (
            ("tokenmill", "tokenmill"),
            ("redis-py's pub/sub", "plain_pubsub"),
        )
    ]
    text = (
        f"{result['subscribers']:,} subscribers on {result['jobs']:,} live streams in "
        f"{result['processes']} processes, a token a job every {result['step_ms']} ms. "
        "tokenmill: from the end of the engine's step, over 30 ms of joining, to the "
        "client's loop; the baseline: from before PUBLISH, a connection each. Target: "
        f"P99 at most {result['target_p99_ms']:.0f} ms.\n"
    )
    header = ("side", "tokens", "P50, ms", "P99, ms", "largest, ms", "connections")
    return "\n".join((text, table((*header, "MiB of all clients"), rows)))


def scale(result: Result, table: Table) -> str:
    """The scheduler with few jobs waiting and with many."""
    levels = result["levels"]
    columns = {f"{int(level):,} waiting": found for level, found in levels.items()}
    columns |= {
        f"{int(level):,}, with a route": found["routed"]
        for level, found in levels.items()
        if "routed" in found
    }
    rows = [
        (title, *(found.get(name) for found in columns.values()))
        for name, title in CHANGES.items()
    ]
    largest = list(levels.values())[-1]
    took = largest["takeover"]
    header = ("", *columns)
    text = (
        "One worker that answers at once, one producer that keeps the level. With "
        f"{took['waiting']:,} jobs waiting a standby led "
        f"{took['leads_after_s']} s after the scheduler was killed and dispatched "
        f"after {took['dispatches_after_s']} s.\n"
    )
    return "\n".join((text, table(header, rows)))


def soak(result: Result, table: Table) -> str:
    """Memory over a long run."""
    rows = [
        (name.replace("_", " "), *(one[k] for k in ("first", "last", "most")), growth)
        for name, one in result["memory_mib"].items()
        for growth in (one["growth_percent"],)
    ]
    text = (
        f"{result['minutes']:g} minutes at {result['load']:g} of the measured "
        f"{result['capacity_jobs_per_s']:,} jobs/s, results kept for "
        f"{result['retention']:g} s. MiB after the warm-up; growth from the first "
        "third of the samples to the last, by medians. Target: at most 5 %.\n"
    )
    header = ("memory", "first", "last", "most", "growth, %")
    return "\n".join((text, table(header, rows)))


QUEUE_SECTIONS: dict[str, Section] = {
    "queue": ("Queue", queue),
    "subscribers": ("Subscribers", subscribers),
    "scale": ("A million waiting jobs", scale),
    "soak": ("Memory over time", soak),
}
