"""Percentiles and rates of jobs that ended, from their records."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from .snapshot import Latency

RATE_MS: Final = 10_000
"""Rates are over this long."""


class Ended(msgspec.Struct, frozen=True, gc=False):
    """One job that ended, as far as its record still tells."""

    at_ms: int
    state: str
    job_class: str
    ttft_ms: float | None
    """None: it made no token."""
    total_ms: float | None


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Returns a percentile by linear interpolation; None of nothing.

    Args:
        ordered: Values, rising.
        share: From 0 to 1.
    """
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    part = place - below
    return ordered[below] * (1 - part) + ordered[above] * part


def latency_of(ends: Iterable[Ended]) -> Latency:
    """Returns percentiles; totals are those of jobs that succeeded."""
    jobs = list(ends)
    first = sorted(job.ttft_ms for job in jobs if job.ttft_ms is not None)
    total = sorted(
        job.total_ms
        for job in jobs
        if job.total_ms is not None and job.state == "succeeded"
    )
    return Latency(
        jobs=len(jobs),
        ttft_p50_ms=percentile(first, 0.50),
        ttft_p95_ms=percentile(first, 0.95),
        ttft_p99_ms=percentile(first, 0.99),
        total_p50_ms=percentile(total, 0.50),
        total_p95_ms=percentile(total, 0.95),
        total_p99_ms=percentile(total, 0.99),
    )


def rate_of(
    ends: Sequence[tuple[int, str]], now_ms: int, *, cut: bool
) -> tuple[float, float]:
    """Returns how many ended a second, and how many failed, over the last `RATE_MS`.

    Args:
        ends: Time in ms and state of the newest ends, in any order.
        now_ms: Now, by the same clock.
        cut: Whether there were more than these: then the rate is over the time that
            they cover, since older ones in the window were not read.
    """
    recent = [(at, state) for at, state in ends if at > now_ms - RATE_MS]
    window_ms = RATE_MS
    if cut and recent and len(recent) == len(ends):
        window_ms = max(1, now_ms - min(at for at, _ in recent))
    seconds = window_ms / 1000
    failed = sum(state == "failed" for _, state in recent)
    return len(recent) / seconds, failed / seconds
