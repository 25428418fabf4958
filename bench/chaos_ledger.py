"""The account of a chaos run: what was done to it, and how soon it went on."""

import bisect
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_streams import progress
from chaos_truth import JobTruth, Truth
from harness import percentile


@dataclass
class Blow:
    """One fault as it was really done."""

    kind: str
    at: float
    """`time.time()` when it was done, or when a stopped process was left alone."""
    subscriber: int | None = None
    held: tuple[str, ...] = ()
    """Jobs of the worker that was hit."""


@dataclass
class Ledger:
    """Collected while the run goes on."""

    blows: list[Blow] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """Faults whose target was down already."""


def recoveries_s(ledger: Ledger, truth: Truth) -> dict[str, list[float]]:
    """Seconds from each fault to the next progress, by kind.

    For a worker it is, of each interactive job that ran there, the next token that its
    subscriber has (bulk waits for its turn, by design);
    for a scheduler the next dispatch; for a subscriber its own next token; else the
    next token of any job.
    """
    by_job: dict[str, list[float]] = defaultdict(list)
    by_subscriber: dict[int, list[float]] = defaultdict(list)
    ids = {number: next(iter(i)) for number, i in truth.submitted.items() if i}
    for (which, number), lines in truth.streams.items():
        times = list(progress(lines))
        by_subscriber[which] += times
        if number in ids:
            by_job[ids[number]] += times
    dispatched = sorted(
        int(job.record["dispatched_ms"]) / 1000
        for job in truth.jobs.values()
        if job.record.get("dispatched_ms")
    )
    everyone = sorted(t for times in by_subscriber.values() for t in times)
    found: dict[str, list[float]] = defaultdict(list)
    for blow in ledger.blows:
        if blow.held:
            timelines = [
                sorted(by_job[job_id])
                for job_id in blow.held
                if job_id in truth.jobs
                and truth.jobs[job_id].record.get("class") == "interactive"
            ]
        elif blow.kind.startswith("worker"):
            timelines = []  # it ran nothing: there is nothing to recover
        elif blow.kind.startswith("scheduler"):
            timelines = [dispatched]
        elif blow.subscriber is not None:
            timelines = [sorted(by_subscriber[blow.subscriber])]
        else:
            timelines = [everyone]
        for times in timelines:
            at = bisect.bisect_right(times, blow.at)
            if at < len(times):
                found[blow.kind].append(times[at] - blow.at)
    return found


def spread(values: list[float]) -> dict[str, float]:
    """P50, P95 and the largest."""
    return {
        "p50": round(percentile(values, 0.5), 2),
        "p95": round(percentile(values, 0.95), 2),
        "max": round(max(values), 2),
    }


def resumed_tokens(job: JobTruth) -> int:
    """Tokens that a later epoch did not have to compute again."""
    epoch, tokens, kept = None, 0, 0
    for entry, delta in job.log:
        found = entry.partition("-")[0]
        if delta is None or not delta.get("token_ids"):
            continue
        if epoch is not None and found != epoch:
            kept += tokens
        epoch, tokens = found, tokens + len(delta["token_ids"])
    return kept


def logged(directory: Path, event: str, count: str) -> int:
    """Sum of a field over all log lines of an event."""
    total = 0
    for path in directory.glob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if f'"{event}"' in line and line.startswith("{"):
                try:
                    total += int(json.loads(line).get(count, 0))
                except ValueError:
                    continue  # cut short by the kill of its process
    return total


def figures(
    ledger: Ledger, truth: Truth, states: dict[str, int], directory: Path
) -> dict[str, Any]:
    """The ledger as one object."""
    jobs = truth.jobs.values()
    losses = [int(job.record.get("lease_losses") or 0) for job in jobs]
    recovered = recoveries_s(ledger, truth)
    everything = [s for times in recovered.values() for s in times]
    return {
        "faults": len(ledger.blows),
        "faults_by_kind": dict(sorted(Counter(b.kind for b in ledger.blows).items())),
        "faults_skipped": dict(sorted(ledger.skipped.items())),
        "jobs_by_state": dict(sorted(states.items())),
        "dead_letters": sum(
            (job.result or {}).get("error", {}).get("code") == "lease_lost"
            for job in jobs
        ),
        "redeliveries": logged(directory, "reaped", "redelivered"),
        "lease_losses": sum(losses),
        "most_lease_losses_of_a_job": max(losses, default=0),
        "jobs_resumed": sum(resumed_tokens(job) > 0 for job in jobs),
        "resumed_tokens": sum(resumed_tokens(job) for job in jobs),
        "subscriber_incarnations": sum(len(times) for times in truth.starts.values()),
        "streamed_deltas": sum(
            "o" in line for lines in truth.streams.values() for line in lines
        ),
        "recovery_s": {k: spread(v) for k, v in sorted(recovered.items())},
        "recovery_all_s": spread(everything) if everything else {},
    }
