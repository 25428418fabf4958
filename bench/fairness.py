"""One tenant with 10,000 jobs beside one with 10: what the small one feels of it.

    python bench/fairness.py [--flood 10000] [--small 10] [--step-ms 20] [--report]

A real pool whose engine takes a fixed time per step (`--engine echo:<ms>`). The small
tenant's jobs come one by one, timed from before the submit until the result is here:
alone; while the other tenant offers 80 % of what the pool can do; and while all of the
other tenant's jobs wait, submitted before. The baseline is one queue, first in, first
out, simulated with the same step time and the same jobs. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Iterator

from harness import Figures, finish, machine, percentile, quiet_logs, show
from queue_pool import pool
from simulate_fifo import fifo
from simulate_group import Group
from simulate_load import Arrival
from simulate_pool import OneLine, Simulation

from tokenmill import Client, Prompt, Sampling
from tokenmill.scheduler.snapshot import WaitingJob

TARGET = 2.0
"""P95 beside the flood at 80 % load, as a multiple of P95 alone, at most."""
TOKENS, RUNNING, LOAD, BATCH = 8, 16, 0.8, 1000
TEXT = "x" * TOKENS
GAP_S = 0.2
"""Between the submits of the small tenant."""


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--flood", type=int, default=10_000, help="jobs of the large tenant")
    add("--small", type=int, default=10, help="jobs of the small tenant")
    add("--step-ms", type=float, default=20.0)
    add("--rounds", type=int, default=3, help="turns; the best of each side counts")
    add("--require-target", action="store_true", help=f"fail above {TARGET} times")
    add("--report", action="store_true", help="save in bench/results")
    return parser.parse_args()


def prompt(tenant: str) -> Prompt:
    """Eight steps of the echo engine."""
    return Prompt(
        TEXT, model="echo", tenant=tenant, sampling=Sampling(max_tokens=TOKENS)
    )


async def small_jobs(mill: Client, count: int) -> list[float]:
    """Times the small tenant's jobs, in milliseconds."""

    async def one() -> float:
        began = time.perf_counter()
        job = await mill.submit(prompt("small"))
        await job.result(timeout=600)
        return (time.perf_counter() - began) * 1000

    running = []
    for _ in range(count):
        running.append(asyncio.create_task(one()))
        await asyncio.sleep(GAP_S)
    return [await task for task in running]


async def offer(mill: Client, per_s: float) -> None:
    """Submits jobs of the large tenant at a fixed rate until cancelled."""
    began, sent = time.perf_counter(), 0
    while True:
        due = int((time.perf_counter() - began) * per_s)
        if due > sent:
            await mill.submit_many([prompt("flood")] * (due - sent))
            sent = due
        await asyncio.sleep(0.05)


async def measure(url: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Runs the three situations on a fresh pool."""
    per_s = LOAD * RUNNING / (TOKENS * options.step_ms / 1000)
    async with Client(url) as mill:
        await small_jobs(mill, 2)  # everything is warm from here
        times = {"alone": await small_jobs(mill, options.small)}
        offering = asyncio.create_task(offer(mill, per_s))
        await asyncio.sleep(2.0)
        times["beside_80_percent"] = await small_jobs(mill, options.small)
        offering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await offering
        left = options.flood
        while left > 0:
            await mill.submit_many([prompt("flood")] * min(left, BATCH))
            left -= BATCH
        times["beside_all_waiting"] = await small_jobs(mill, options.small)
    return times


def first_come(options: argparse.Namespace) -> list[float]:
    """The small tenant's times behind all waiting jobs, in one queue (ms)."""

    def arrivals() -> Iterator[Arrival]:
        for number in range(options.flood + options.small):
            late = number - options.flood
            at = max(late, 0) * GAP_S * 1000
            job = WaitingJob(
                id=f"{number:06}",
                tokens=TOKENS,
                max_tokens=TOKENS,
                bucket="128",
                tenant="flood" if late < 0 else "small",
                enqueued_ms=int(at),
            )
            yield at, job, TOKENS

    groups = [Group("echo", (options.step_ms, 0.0), max_running=RUNNING)]
    outcome = Simulation(fifo, OneLine(), groups, {}, 5.0).run(arrivals())
    return [
        run.finished_ms - run.job.enqueued_ms
        for run in outcome.ended
        if run.job.tenant == "small"
    ]


def summary(times: list[float]) -> Figures:
    """Returns the median and P95 of some times."""
    return {
        "p50_ms": round(percentile(times, 0.5), 1),
        "p95_ms": round(percentile(times, 0.95), 1),
    }


def main() -> int:
    """Runs everything and prints the figures, the JSON line last."""
    options = parse()
    quiet_logs()
    report: dict[str, object] = {"benchmark": "fairness", "machine": machine()}
    best: dict[str, Figures] = {}
    for _ in range(options.rounds):
        with pool(
            engine=f"echo:{options.step_ms:g}",
            TOKENMILL_WORKER_MAX_RUNNING=str(RUNNING),
        ) as running:
            times = asyncio.run(measure(running.url, options))
        for name, values in times.items():
            found = summary(values)
            if name not in best or found["p95_ms"] < best[name]["p95_ms"]:
                best[name] = found
    best["first_in_first_out"] = summary(first_come(options))
    for name, found in best.items():
        show(name, found)
    alone = best["alone"]["p95_ms"]
    ratios = {
        f"{name}_ratio": round(found["p95_ms"] / alone, 2)
        for name, found in best.items()
        if name != "alone"
    }
    show("P95 as a multiple of P95 alone", ratios)
    problems = []
    if options.require_target and ratios["beside_80_percent_ratio"] > TARGET:
        problems.append(f"P95 beside the flood is {ratios['beside_80_percent_ratio']}")
    report |= {
        "flood_jobs": options.flood,
        "small_jobs": options.small,
        "step_ms": options.step_ms,
        **best,
        **ratios,
        "target": TARGET,
        "problems": problems,
    }
    return finish(report, save=options.report)


if __name__ == "__main__":
    raise SystemExit(main())
