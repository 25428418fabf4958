"""One tenant with 10,000 jobs beside one with few: what the small one feels of it.

    python bench/fairness.py [--flood 10000] [--small 40] [--step-ms 20] [--report]

A real pool whose engine takes a fixed time per step (`--engine echo:<ms>`). First what
it can do is measured. The small tenant's jobs come one by one, timed from before the
submit until the result is here: alone; while the other tenant offers 80 % of what the
pool can do; and while all of the other tenant's jobs wait, submitted before. A ratio is
taken within each round, and the middle one of all rounds counts. The baseline is one
queue, first in, first out, simulated with the same step time and the same jobs. The
last line is JSON.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

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
PROBE_S = 5.0
"""Work for about so long, by the step time, shows what the pool can do."""
LEAST_OFFERED = 0.95
"""Part of the load aimed at that must really have been offered."""


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--flood", type=int, default=10_000, help="jobs of the large tenant")
    add("--small", type=int, default=40, help="jobs of the small tenant")
    add("--step-ms", type=float, default=20.0)
    add("--rounds", type=int, default=3, help="turns; the middle ratio counts")
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


async def capacity(mill: Client, options: argparse.Namespace) -> float:
    """Jobs per second that the pool can do, measured."""
    count = round(PROBE_S * RUNNING / (TOKENS * options.step_ms / 1000))
    began = time.perf_counter()
    jobs = await mill.submit_many([prompt("flood")] * count)
    await asyncio.gather(*(job.result(timeout=600) for job in jobs))
    return count / (time.perf_counter() - began)


class Offer:
    """Submits jobs of the large tenant at a fixed rate.

    Args:
        mill: The client.
        per_s: The rate.
    """

    def __init__(self, mill: Client, per_s: float) -> None:
        self._mill = mill
        self._per_s = per_s
        self._began = time.perf_counter()
        self._sent = 0

    async def run(self) -> None:
        """Goes on until cancelled."""
        while True:
            due = int((time.perf_counter() - self._began) * self._per_s)
            if due > self._sent:
                await self._mill.submit_many([prompt("flood")] * (due - self._sent))
                self._sent = due
            await asyncio.sleep(0.05)

    def per_s(self) -> float:
        """The rate so far."""
        return self._sent / (time.perf_counter() - self._began)


@dataclass
class Round:
    """What one pool showed."""

    times: dict[str, list[float]]
    """Milliseconds of the small tenant's jobs, by situation."""
    capacity_per_s: float
    offered_per_s: float

    def ratio(self, name: str) -> float:
        """P95 in a situation over P95 alone."""
        return percentile(self.times[name], 0.95) / percentile(
            self.times["alone"], 0.95
        )


async def measure(url: str, options: argparse.Namespace) -> Round:
    """Runs the three situations on a fresh pool."""
    async with Client(url) as mill:
        await small_jobs(mill, 2)  # everything is warm from here
        most = await capacity(mill, options)
        times = {"alone": await small_jobs(mill, options.small)}
        offer = Offer(mill, LOAD * most)
        offering = asyncio.create_task(offer.run())
        await asyncio.sleep(2.0)
        times["beside_80_percent"] = await small_jobs(mill, options.small)
        offered = offer.per_s()
        offering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await offering
        left = options.flood
        while left > 0:
            await mill.submit_many([prompt("flood")] * min(left, BATCH))
            left -= BATCH
        times["beside_all_waiting"] = await small_jobs(mill, options.small)
    return Round(times, most, offered)


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


def problems_of(
    rounds: list[Round], ratios: Figures, options: argparse.Namespace
) -> list[str]:
    """What was not as it was to be."""
    problems = [
        f"{one.offered_per_s:.0f} jobs/s offered of {LOAD * one.capacity_per_s:.0f}"
        for one in rounds
        if one.offered_per_s < LEAST_OFFERED * LOAD * one.capacity_per_s
    ]
    ratio = ratios["beside_80_percent_ratio"]
    if options.require_target and ratio > TARGET:
        problems.append(f"P95 beside the flood is {ratio} times that alone")
    return problems


def main() -> int:
    """Runs everything and prints the figures, the JSON line last."""
    options = parse()
    quiet_logs()
    report: dict[str, object] = {"benchmark": "fairness", "machine": machine()}
    rounds: list[Round] = []
    for _ in range(options.rounds):
        with pool(
            engine=f"echo:{options.step_ms:g}",
            TOKENMILL_WORKER_MAX_RUNNING=str(RUNNING),
        ) as running:
            rounds.append(asyncio.run(measure(running.url, options)))
    # The round with the middle ratio at 80 % load stands for all.
    rounds.sort(key=lambda one: one.ratio("beside_80_percent"))
    middle = rounds[len(rounds) // 2]
    baseline = first_come(options)
    sides = {name: summary(times) for name, times in middle.times.items()}
    sides["first_in_first_out"] = summary(baseline)
    for name, found in sides.items():
        show(name, found)
    ratios = {
        f"{name}_ratio": round(middle.ratio(name), 2)
        for name in ("beside_80_percent", "beside_all_waiting")
    }
    alone = sides["alone"]["p95_ms"]
    queued = sides["first_in_first_out"]["p95_ms"]
    ratios["first_in_first_out_ratio"] = round(queued / alone, 2)
    show("P95 as a multiple of P95 alone", ratios)
    report |= {
        "flood_jobs": options.flood,
        "small_jobs": options.small,
        "step_ms": options.step_ms,
        "capacity_per_s": round(middle.capacity_per_s, 1),
        "offered_per_s": round(middle.offered_per_s, 1),
        "ratios_of_rounds": [round(r.ratio("beside_80_percent"), 2) for r in rounds],
        **sides,
        **ratios,
        "target": TARGET,
        "problems": problems_of(rounds, ratios, options),
    }
    return finish(report, save=options.report)


if __name__ == "__main__":
    raise SystemExit(main())
