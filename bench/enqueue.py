"""How fast jobs get into the queue, what a waiting one costs, and at which depth.

    python bench/enqueue.py [--jobs 20000] [--rounds 5]   rates, beside arq and XADD
    python bench/enqueue.py --memory [--jobs 100000]      bytes of Redis a waiting job
    python bench/enqueue.py --waiting 1000,1000000        rates at these depths

One client process, one Redis, nobody who takes the jobs. What is compared runs in the
same process, in turns, and each figure is the best of all rounds: other work on the
machine can only make it worse. The last line is one JSON object.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from enqueue_sides import Arq, Mill, Side, Stream
from harness import finish, machine, show
from redis_servers import SERVERS, running

TARGETS = {
    "submit_many_per_s": 10_000,
    "submit_per_s": 3_000,
    "bytes_per_job": 700,
    "deepest_to_shallowest": 0.8,
}
TASKS = 50
"""Tasks that submit one job after the other."""
DEPTH_JOBS = 2_000
"""Jobs of one measurement at a depth."""
Work = Callable[[int], Awaitable[object]]
"""Enqueues so many jobs."""


@dataclass
class Best:
    """The best of several rounds, each figure by itself."""

    per_s: list[float] = field(default_factory=list)
    client_us: list[float] = field(default_factory=list)
    redis_us: list[float] = field(default_factory=list)

    async def take(self, side: Side, count: int, work: Work) -> None:
        """Measures one round: rate, and processor time of both ends for each job."""
        redis_s = await side.redis_cpu_s()
        client_s, began = time.process_time(), time.perf_counter()
        await work(count)
        self.per_s.append(count / (time.perf_counter() - began))
        self.client_us.append((time.process_time() - client_s) / count * 1e6)
        self.redis_us.append((await side.redis_cpu_s() - redis_s) / count * 1e6)

    def figures(self, name: str) -> dict[str, float]:
        """All three, named after what was measured."""
        return {
            f"{name}_per_s": round(max(self.per_s)),
            f"{name}_per_s_median": round(sorted(self.per_s)[len(self.per_s) // 2]),
            f"{name}_client_us": round(min(self.client_us), 1),
            f"{name}_redis_us": round(min(self.redis_us), 1),
        }


async def rates(jobs: int, rounds: int) -> dict[str, object]:
    """Best rates of every side on one server, emptied before each turn."""
    figures: dict[str, object] = {"jobs": jobs, "rounds": rounds}
    with running("--appendonly", "yes") as (_, url):
        mill, arq, stream = Mill(url), Arq(url), Stream(url)
        sides: dict[str, tuple[Side, int, Work]] = {
            "submit_many": (mill, jobs, mill.many),
            "submit": (mill, jobs // 2, partial(mill.singles, tasks=TASKS)),
            "arq_enqueue_job": (arq, jobs // 4, partial(arq.singles, tasks=TASKS)),
            "xadd_pipelined": (stream, jobs, stream.many),
        }
        found = {name: Best() for name in sides}
        for side in (mill, arq, stream):
            await side.open()
        for _ in range(rounds):
            for name, (side, count, work) in sides.items():
                await side.reset()
                await found[name].take(side, count, work)
        for side in (mill, arq, stream):
            await side.close()
    for name, best in found.items():
        figures |= best.figures(name)
    return figures


async def memory(jobs: int) -> dict[str, object]:
    """Bytes that one waiting job takes beyond its payload, for each server."""
    figures: dict[str, object] = {"jobs": jobs}
    for version in SERVERS:
        with running(version=version) as (_, url):
            mill = Mill(url)
            await mill.open()
            await mill.reset()
            await mill.many(1)  # scripts and shared keys are there
            before = await mill.used_memory()
            payload = await mill.fill(jobs)
            used = await mill.used_memory() - before
            await mill.close()
        figures[f"bytes_per_job_{version}"] = round((used - payload) / jobs)
        figures[f"payload_bytes_{version}"] = round(payload / jobs)
    return figures


async def depths(waiting: list[int], rounds: int) -> dict[str, object]:
    """Best figures while so many jobs wait: one server each, measured in turns."""
    figures: dict[str, object] = {"rounds": rounds}
    many = {depth: Best() for depth in waiting}
    one = {depth: Best() for depth in waiting}
    with contextlib.ExitStack() as stack:
        mills = {}
        for depth in waiting:
            _, url = stack.enter_context(running())
            mills[depth] = Mill(url)
            await mills[depth].open()
            await mills[depth].hold(depth)
            print(f"{depth} jobs wait", flush=True)
        for _ in range(rounds):
            for depth, mill in mills.items():
                await mill.hold(depth)
                await many[depth].take(mill, DEPTH_JOBS, mill.many)
                singles = partial(mill.singles, tasks=TASKS)
                await mill.hold(depth)
                await one[depth].take(mill, DEPTH_JOBS, singles)
        for mill in mills.values():
            await mill.close()
    for depth in waiting:
        figures |= many[depth].figures(f"submit_many_at_{depth}")
        figures |= one[depth].figures(f"submit_at_{depth}")
    first, last = waiting[0], waiting[-1]
    for name, best in (("submit_many", many), ("submit", one)):
        figures[f"deepest_to_shallowest_{name}"] = round(
            max(best[last].per_s) / max(best[first].per_s), 3
        )
        figures[f"deepest_to_shallowest_{name}_redis_us"] = round(
            min(best[last].redis_us) / min(best[first].redis_us), 3
        )
    return figures


def problems_of(figures: dict[str, object]) -> list[str]:
    """What misses its target."""
    problems = []
    for name, bound in TARGETS.items():
        for found, value in figures.items():
            if found != name and not found.startswith(f"{name}_"):
                continue
            if found.endswith(("_median", "_us")) or not isinstance(value, int | float):
                continue
            if (value > bound) if name == "bytes_per_job" else (value < bound):
                problems.append(f"{found} is {value}; the target is {bound}")
    return problems


def main() -> int:
    """Runs one of the three and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--waiting", help="depths, separated by commas")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    report: dict[str, object] = {"benchmark": "enqueue", "machine": machine()}
    if options.memory:
        report["benchmark"] = "enqueue_memory"
        figures = asyncio.run(memory(options.jobs or 100_000))
    elif options.waiting:
        report["benchmark"] = "enqueue_waiting"
        waiting = sorted(int(depth) for depth in options.waiting.split(","))
        figures = asyncio.run(depths(waiting, options.rounds))
    else:
        figures = asyncio.run(rates(options.jobs or 20_000, options.rounds))
    show(str(report["benchmark"]), figures)
    report |= figures | {"targets": TARGETS, "problems": problems_of(figures)}
    return finish(report, save=options.report)


if __name__ == "__main__":
    raise SystemExit(main())
