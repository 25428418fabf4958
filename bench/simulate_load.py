"""Seeded workloads for the simulations: tenants, classes, lengths, bursts."""

from collections.abc import Iterator, Sequence

import numpy as np

from tokenmill.scheduler.snapshot import WaitingJob
from tokenmill.shared.keys import bucket_of
from tokenmill.shared.messages import JobClass

BOUNDS = (128, 512, 2048, 8192)
CHUNK = 20_000
TENANTS: dict[str, tuple[float, float]] = {
    "flood": (0.50, 1.0),
    "paid": (0.20, 4.0),
    "team-a": (0.12, 1.0),
    "team-b": (0.10, 1.0),
    "team-c": (0.05, 1.0),
    "rare": (0.03, 1.0),
}
"""Tenant -> share of the jobs, weight."""
BULK_PART = 0.3
BURST_MS, QUIET_MS = 15_000.0, 15_000.0
BURST, QUIET = 1.5, 0.5
"""Rate in bursts and between them, as multiples of the mean."""

Arrival = tuple[float, WaitingJob, int]
"""When (ms), the job, and how many tokens it will make."""


def mixed(jobs: int, per_ms: float, seed: int) -> Iterator[Arrival]:
    """Yields jobs of several tenants and classes, in bursts.

    Prompts are log-normal with a median of 90 tokens, one in a hundred above 1000;
    bulk prompts are three times as long. Outputs make 30 to 100 % of what is asked.

    Args:
        jobs: How many.
        per_ms: Mean rate.
        seed: Repeats the same.
    """
    random = np.random.default_rng(seed)
    names = list(TENANTS)
    shares = np.array([share for share, _ in TENANTS.values()])
    number, at = 0, 0.0
    while number < jobs:
        count = min(CHUNK, jobs - number)
        gaps = random.exponential(1 / per_ms, count)
        tenant = random.choice(len(names), count, p=shares / shares.sum())
        bulk = random.random(count) < BULK_PART
        tokens = random.lognormal(4.5, 1.0, count) * np.where(bulk, 3.0, 1.0)
        asked = random.integers(16, 129, count) * np.where(bulk, 2, 1)
        made = np.maximum(1, asked * random.uniform(0.3, 1.0, count)).astype(int)
        priority = random.integers(-1, 2, count)
        for i in range(count):
            in_burst = at % (BURST_MS + QUIET_MS) < BURST_MS
            at += gaps[i] / (BURST if in_burst else QUIET)
            size = int(min(max(tokens[i], 4), 3500))
            yield (
                at,
                WaitingJob(
                    id=f"{number:07}",
                    tokens=size,
                    max_tokens=int(asked[i]),
                    job_class=JobClass.BULK if bulk[i] else JobClass.INTERACTIVE,
                    bucket=bucket_of(size, BOUNDS),
                    priority=int(priority[i]),
                    tenant=names[tenant[i]],
                    enqueued_ms=int(at),
                ),
                int(made[i]),
            )
            number += 1


def two_lengths(jobs: int, per_ms: float, seed: int, long_part: float) -> list[Arrival]:
    """Returns interactive jobs of two lengths, about 20 times apart.

    Args:
        jobs: How many.
        per_ms: Mean rate, without bursts.
        seed: Repeats the same.
        long_part: Part of the jobs that is long.
    """
    random = np.random.default_rng(seed)
    at = np.cumsum(random.exponential(1 / per_ms, jobs))
    long = random.random(jobs) < long_part
    tokens = np.where(
        long, random.integers(2100, 3500, jobs), random.integers(20, 240, jobs)
    )
    asked = random.integers(32, 129, jobs)
    return [
        (
            float(at[i]),
            WaitingJob(
                id=f"{i:07}",
                tokens=int(tokens[i]),
                max_tokens=int(asked[i]),
                bucket=bucket_of(int(tokens[i]), BOUNDS),
                tenant="t",
                enqueued_ms=int(at[i]),
            ),
            int(asked[i]),
        )
        for i in range(jobs)
    ]


def group_ms_per_job(
    arrivals: Sequence[Arrival], fit: tuple[float, float], running: int
) -> float:
    """Returns the time of a full group that a mean job takes (ms).

    Args:
        arrivals: A sample of the workload.
        fit: (a, b) of a step's time.
        running: Sequences that share a step's fixed part.
    """
    base, token = fit
    tokens = sum(job.tokens for _, job, _ in arrivals) / len(arrivals)
    made = sum(output for *_, output in arrivals) / len(arrivals)
    prefill_steps = max(tokens / 512, 0.2)
    return token * (tokens + made) + base * (made / running + prefill_steps)
