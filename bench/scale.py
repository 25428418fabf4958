"""A thousand waiting jobs and a million: does the scheduler notice?

    python bench/scale.py [--waiting 1000,1000000] [--seconds 15] [--report]

For each level, on a server of its own: jobs of some tenants are enqueued until that
many wait; then, with the worker stopped, the scheduler's processor time and memory;
then, with one worker (echo, which answers at once) and a producer that keeps the level,
jobs dispatched per second, the scheduler's processor time per job, and the times of its
step, its plan and its reading, taken inside the process; then the same once more after
a further version has been registered, so that the model has a route. At the largest
level the scheduler is killed while a standby waits: time until the standby leads, and
until it dispatches. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import redis
from harness import finish, machine, new_parser, percentile, show
from queue_pool import (
    HERE,
    client,
    cpu_s,
    environment,
    process,
    redis_server,
    report_of,
    rss_mib,
    wait_until,
    worker,
)
from scale_routes import cost, register
from scale_verdict import changed

SHARD = "tm:{echo:0}:"
TAKEOVER_S = 3.0
FILL_S = 3600.0
"""Longest time of a fill."""
WARM_S = 3.0
"""After a worker's start, before anything counts."""
LIMITS = {
    "TOKENMILL_LIMITS_MAX_WAITING_JOBS": "10000000",
    "TOKENMILL_LIMITS_MAX_WAITING_TOKENS": "10000000000",
    "TOKENMILL_LIMITS_TENANT_WAITING_JOBS": "10000000",
    "TOKENMILL_LIMITS_TENANT_WAITING_TOKENS": "10000000000",
    "TOKENMILL_LIMITS_MAX_WAITING_BYTES": "100000000000",
}
SERVER = ("--appendonly", "no")
"""A million jobs are a gigabyte of append-only file, which nothing here reads."""


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--waiting", default="1000,1000000", help="levels, with commas between")
    add("--tenants", type=int, default=8, help="that share the jobs evenly")
    add("--seconds", type=float, default=15.0, help="length of each measurement")
    add("--report", action="store_true", help="save the figures in bench/results")
    return parser.parse_args()


@dataclass
class Shard:
    """One server with its scheduler."""

    url: str
    server: "subprocess.Popen[bytes]"
    scheduler: "subprocess.Popen[str]"
    times: Path
    """Where the scheduler leaves the times of its parts when it ends."""
    db: "redis.Redis"

    def waiting(self) -> int:
        """Jobs that wait now."""
        return int(cast("bytes", self.db.hget(f"{SHARD}load", "jobs")) or 0)

    def fence(self) -> int:
        """Number of the active scheduler."""
        return int(cast("bytes", self.db.hget(f"{SHARD}scheduler", "fence")) or 0)

    def used_memory(self) -> int:
        """Bytes that Redis uses."""
        return int(cast("dict[str, int]", self.db.info("memory"))["used_memory"])

    def groups(self) -> int:
        """Live worker groups."""
        return int(cast("int", self.db.zcard(f"{SHARD}groups")))


def scheduler_command(url: str, times: Path) -> list[str]:
    """A scheduler that keeps the times of its parts."""
    return [sys.executable, str(HERE / "scale_scheduler.py"), url, str(times)]


@contextlib.contextmanager
def shard() -> Iterator[Shard]:
    """Starts one; a worker has been there, so that its model is known."""
    env = environment(**LIMITS)
    with contextlib.ExitStack() as stack:
        server, url = stack.enter_context(redis_server(*SERVER))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        times = folder / "times.json"
        command = scheduler_command(url, times)
        scheduler = stack.enter_context(process(command, env=env))
        db = stack.enter_context(redis.Redis.from_url(url))
        made = Shard(url, server, scheduler, times, db)
        with worker(url, env=env):
            wait_until(lambda: made.groups() and db.exists("tm:pool"), "the pool")
        wait_until(lambda: not made.groups(), "the end of the first worker")
        yield made


def idle(made: Shard, seconds: float) -> dict[str, float]:
    """The scheduler while nobody takes what waits."""
    time.sleep(WARM_S)
    before, began = cpu_s(made.scheduler.pid), time.monotonic()
    time.sleep(seconds)
    used = cpu_s(made.scheduler.pid) - before
    share = used / (time.monotonic() - began)
    return {
        "idle_cpu_percent": round(share * 100, 2),
        "scheduler_rss_mib": round(rss_mib(made.scheduler.pid), 1),
    }


def busy(made: Shard, level: int, options: argparse.Namespace) -> dict[str, float]:
    """The scheduler while one worker takes jobs as fast as they come."""
    pipe = subprocess.PIPE
    holder = client(
        "scale_client.py",
        *("hold", made.url, level, options.tenants),
        stdin=pipe,
        stdout=pipe,
    )
    try:
        with worker(made.url, env=environment(**LIMITS)):
            wait_until(made.groups, "a worker")
            time.sleep(WARM_S)
            pids = {"scheduler": made.scheduler.pid, "redis": made.server.pid}
            before = {name: cpu_s(pid) for name, pid in pids.items()}
            drained, began = num_dispatched(made), time.monotonic()
            time.sleep(options.seconds)
            jobs, until = num_dispatched(made) - drained, time.monotonic()
            used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
            kept = made.waiting()
        report_of(holder)
        if not jobs:
            raise SystemExit(f"no job was dispatched in {options.seconds:.0f} s")
    finally:
        holder.kill()
        holder.wait()
    found = {
        "dispatched_per_s": round(jobs / (until - began)),
        "waiting_at_the_end": kept,
        "rss_busy_mib": round(rss_mib(made.scheduler.pid), 1),
        **{f"{name}_us_per_job": round(s / jobs * 1e6) for name, s in used.items()},
    }
    spans = spans_of(made, began, until)
    planned = sum(spans["plan"]) / jobs * 1e6
    return found | {"plan_us_per_job": round(planned, 1)} | percentiles(spans)


def num_dispatched(made: Shard) -> int:
    """Jobs that one worker has taken: what its work stream has ever held."""
    total = 0
    for member in cast("list[bytes]", made.db.zrange(f"{SHARD}groups", 0, -1)):
        name = f"{SHARD}work:{member.decode()}"
        if made.db.exists(name):
            info = cast("dict[str, int]", made.db.xinfo_stream(name))
            total += info["entries-added"]
    return total


def spans_of(made: Shard, began: float, until: float) -> dict[str, list[float]]:
    """Seconds that the scheduler's parts took, within a span of time."""
    made.scheduler.send_signal(signal.SIGUSR1)
    wait_until(made.times.exists, "the scheduler's times")
    spans = json.loads(made.times.read_text())
    made.times.unlink()
    return {
        name: [took for at, took in entries if began <= at <= until]
        for name, entries in spans.items()
    }


def percentiles(spans: dict[str, list[float]]) -> dict[str, float]:
    """Median and P99 of each part in milliseconds, and how often it ran."""
    found: dict[str, float] = {}
    for name, took in spans.items():
        found[f"{name}_p50_ms"] = round(percentile(took, 0.5) * 1000, 3)
        found[f"{name}_p99_ms"] = round(percentile(took, 0.99) * 1000, 3)
        found[f"{name}_calls"] = len(took)
    return found


def takeover(made: Shard) -> dict[str, float]:
    """Kills the scheduler with a standby beside it and a worker that wants jobs."""
    env = environment(**LIMITS)
    standby = scheduler_command(made.url, made.times.with_name("standby.json"))
    with process([*standby, "--standby"], env=env), worker(made.url, env=env):
        wait_until(made.groups, "a worker")
        time.sleep(WARM_S)
        fence = made.fence()
        made.scheduler.kill()
        killed = time.monotonic()
        made.scheduler.wait()
        left = made.waiting()
        # What the dead one had sent is in Redis by now: less can only be new work.
        wait_until(lambda: made.fence() > fence, "a new leader")
        led = time.monotonic() - killed
        left = made.waiting()
        wait_until(lambda: made.waiting() < left, "a dispatch")
        return {
            "leads_after_s": round(led, 2),
            "dispatches_after_s": round(time.monotonic() - killed, 2),
            "waiting": left,
        }


def measure(
    level: int, options: argparse.Namespace, *, last: bool
) -> dict[str, object]:
    """All figures of one level."""
    with shard() as made:
        empty = made.used_memory()
        filled = report_of(
            client(
                "scale_client.py",
                *("fill", made.url, level, options.tenants),
                stdout=subprocess.PIPE,
            ),
            FILL_S,
        )
        figures: dict[str, object] = {
            "waiting": made.waiting(),
            "enqueue_first_per_s": round(filled["first_per_s"]),
            "enqueue_last_per_s": round(filled["last_per_s"]),
            "redis_bytes_per_job": round((made.used_memory() - empty) / level),
            "payload_bytes_per_job": round(filled["payload_bytes"]),
            **idle(made, options.seconds),
            **busy(made, level, options),
        }
        # What a group has taken is counted only while it is known to live.
        wait_until(lambda: not made.groups(), "the end of the worker")
        register(made.url)
        routed = busy(made, level, options)
        figures |= {"routed": routed, "routed_ratios": cost(figures, routed)}
        if last:
            figures["takeover"] = takeover(made)
        return figures


def parts_of(figures: dict[str, object]) -> dict[str, dict[str, object]]:
    """Figures by the end of their title: of the level itself, and of what is in it."""
    parts = {f", {k}": v for k, v in figures.items() if isinstance(v, dict)}
    own = {k: v for k, v in figures.items() if not isinstance(v, dict)}
    return {"": own, **parts}


def main() -> int:
    """Runs every level and prints the figures as one line of JSON."""
    options = arguments()
    waiting = sorted(int(level) for level in options.waiting.split(","))
    report: dict[str, object] = {"benchmark": "scale", "machine": machine()}
    levels: dict[str, dict[str, object]] = {}
    for level in waiting:
        found = measure(level, options, last=level == waiting[-1])
        levels[str(level)] = found
        for title, part in parts_of(found).items():
            show(f"{level:,} waiting{title}", part)
    ratios, problems = changed(levels)
    took = cast("dict[str, float]", levels[str(waiting[-1])]["takeover"])
    if took["leads_after_s"] > TAKEOVER_S:
        problems.append(f"the standby led after {took['leads_after_s']} s")
    report |= {"levels": levels, "ratios": ratios, "problems": problems}
    return finish(report, save=options.report)


if __name__ == "__main__":
    sys.exit(main())
