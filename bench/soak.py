"""A whole pool under steady load: does anything grow?

    python bench/soak.py [--minutes 30] [--load 0.5] [--report]

Redis, scheduler, janitor, two workers (the echo engine with a fixed time a step) and
two client processes, which submit, stream, read results, cancel some jobs and let some
expire; every text is compared. First the same clients find out, 600 jobs at a time,
what the pool can do; then they submit at a fraction of that. Results are kept for a
minute, so that Redis has its steady state early. Memory of every process, and what
Redis uses, is sampled; the exit status is 1 when any of them grows by more than 5 %
after the warm-up, when a client saw anything wrong, or when less than 95 % of the load
was there. The last line is one JSON object.
"""

import argparse
import subprocess
import sys
import time
from typing import cast

import redis
from harness import finish, machine, new_parser, show
from queue_pool import Pool, client, pool, report_of, rss_mib
from queue_sides import ours, parts
from soak_verdict import GROWTH_PERCENT, growth_percent, load_problems

PROBE_S = 10.0
"""Length of the run that finds the pool's capacity."""
CLIENTS = 2
Samples = dict[str, list[float]]


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="of load, warm-up included")
    add("--load", type=float, default=0.5, help="share of what the pool can do")
    add("--retention", type=float, default=60.0, help="seconds that results stay")
    add("--warm-up", type=float, default=0.0, help="seconds; 0 is a fifth of the time")
    add("--every", type=float, default=5.0, help="seconds between two samples")
    add("--step-ms", type=int, default=10, help="time of a step of the engine")
    add("--first-jobs", type=int, default=11_000, help="run before anything counts")
    add("--seed", type=int, default=1)
    add("--report", action="store_true", help="save the figures in bench/results")
    return parser.parse_args()


def start_clients(
    running: Pool, seconds: float, per_s: float, seed: int
) -> list["subprocess.Popen[str]"]:
    """Starts clients that submit so many jobs a second in all; 0: as they can."""
    return [
        client(
            "soak_client.py",
            *(running.url, seconds, per_s / CLIENTS, seed + number),
            stdout=subprocess.PIPE,
        )
        for number in range(CLIENTS)
    ]


def totals(clients: list["subprocess.Popen[str]"]) -> dict[str, float]:
    """Sums what the clients report at their end."""
    found: dict[str, float] = {}
    for one in clients:
        for name, value in report_of(one).items():
            found[name] = found.get(name, 0) + value
    return found


def capacity(running: Pool, seed: int) -> float:
    """Jobs per second that clients, pool and machine can do together."""
    return rate(totals(start_clients(running, PROBE_S, 0.0, seed)))


def rate(done: dict[str, float]) -> float:
    """Jobs per second, by the clients' own clocks."""
    return done["ended"] / (done["seconds"] / CLIENTS)


def sample(
    running: Pool, clients: list["subprocess.Popen[str]"], samples: Samples
) -> None:
    """Notes the memory of everything now, in MiB."""
    with redis.Redis.from_url(running.url) as server:
        used = cast("dict[str, int]", server.info("memory"))["used_memory"]
        keys = cast("int", server.dbsize())
    now = {f"{name}_rss": mib for name, mib in running.rss_mib().items()}
    now |= {f"client-{n + 1}_rss": rss_mib(one.pid) for n, one in enumerate(clients)}
    now |= {"redis_used_memory": used / 2**20, "redis_keys": float(keys)}
    for name, value in now.items():
        samples.setdefault(name, []).append(round(value, 2))


def loaded(
    running: Pool, options: argparse.Namespace, per_s: float
) -> tuple[Samples, dict[str, float]]:
    """Runs the load and samples meanwhile."""
    seconds = options.minutes * 60
    samples: Samples = {}
    clients = start_clients(running, seconds, per_s, options.seed)
    began = time.monotonic()
    # The clients' end, with its last jobs, is not part of the steady state.
    while time.monotonic() - began < seconds - options.every:
        time.sleep(options.every)
        dead = [name for name, part in running.parts.items() if part.poll() is not None]
        if dead:
            raise SystemExit(f"ended during the run: {', '.join(dead)}")
        sample(running, clients, samples)
    return samples, totals(clients)


def judge(
    samples: Samples, options: argparse.Namespace
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Growth of everything after the warm-up, and what grew too much."""
    warm_s = options.warm_up or max(options.minutes * 12, 1.5 * options.retention)
    skip = round(warm_s / options.every)
    found: dict[str, dict[str, float]] = {}
    problems: list[str] = []
    for name, values in samples.items():
        kept = values[skip:]
        growth = growth_percent(kept)
        found[name] = {
            "first": kept[0],
            "last": kept[-1],
            "most": max(kept),
            "growth_percent": round(growth, 2),
        }
        if growth > GROWTH_PERCENT and name != "redis_keys":
            problems.append(f"{name} grew by {growth:.1f} %")
    return found, problems


def main() -> int:
    """Runs the load and prints the figures as one line of JSON."""
    options = arguments()
    report: dict[str, object] = {
        "benchmark": "soak",
        "machine": machine(),
        **{name: value for name, value in vars(options).items() if name != "report"},
    }
    retention = f"{options.retention:.0f}"
    with pool(
        engine=f"echo:{options.step_ms}",
        workers=2,
        janitor=True,
        TOKENMILL_RETENTION_RESULT_S=retention,
        TOKENMILL_WORKER_MAX_RUNNING="256",
    ) as running:
        # Redis keeps lists of the newest jobs: those shall be full before it counts.
        parts(ours, running.url, options.first_jobs)
        most = capacity(running, options.seed + 1000)
        print(f"capacity: {most:.0f} jobs/s", flush=True)
        samples, done = loaded(running, options, most * options.load)
    memory, problems = judge(samples, options)
    problems += load_problems(
        done.get("not_sent", 0.0), rate(done), most * options.load
    )
    seen = {name: value for name, value in done.items() if name != "seconds"}
    if seen.pop("wrong"):
        problems.append(f"{done['wrong']:.0f} jobs ended otherwise than they should")
    report |= {
        "capacity_jobs_per_s": round(most),
        "wanted_jobs_per_s": round(most * options.load),
        "jobs_per_s": round(rate(done)),
        "clients": seen,
        "memory_mib": memory,
        "samples": samples,
        "problems": problems,
    }
    show("jobs", seen)
    show("growth, %", {name: one["growth_percent"] for name, one in memory.items()})
    return finish(report, save=options.report)


if __name__ == "__main__":
    sys.exit(main())
