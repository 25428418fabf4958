"""Throughput of tokenmill and of each peer, measured the same way.

A producer process submits, a reader process reads every result back and compares it;
the rate counts from before the first submit until the last result is compared. Each
side has a server of its own with the same binary and settings, and as many processes:
redis, producer, reader, and scheduler and worker, or two workers.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import redis
from queue_pool import (
    HERE,
    Pool,
    cpu_s,
    environment,
    process,
    redis_server,
    report_of,
    session_cpu_s,
)

PEERS = ("arq", "streaq", "taskiq")
Figures = dict[str, object]
WARM_JOBS = 500
"""Jobs before the measured ones."""
QUIET_S = 0.25
PROCESSED_S = 120.0
"""Longest wait until a peer has processed all jobs."""


@dataclass(frozen=True)
class Peer:
    """One library, with the interpreter of the environment that it is installed in."""

    name: str
    python: str

    @property
    def script(self) -> str:
        """Its script."""
        return str(HERE / "peers" / f"queue_{self.name}.py")

    def command(self, *arguments: object) -> list[str]:
        """How its script is run."""
        return [self.python, self.script, *map(str, arguments)]

    def problem(self) -> str | None:
        """Returns why it cannot take part, or None."""
        if not Path(self.python).exists():
            return f"no interpreter at {self.python}"
        check = [self.python, "-c", f"import {self.name}"]
        found = subprocess.run(check, capture_output=True, text=True, check=False)
        if found.returncode:
            return found.stderr.strip().splitlines()[-1]
        return None


def parts(
    command: Callable[..., list[str]], url: str, jobs: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Runs a producer and a reader; returns what each reports."""
    pipe, env = subprocess.PIPE, environment(TOKENMILL_BENCH_URL=url)
    producer = subprocess.Popen(
        command("produce", url, jobs), stdout=pipe, stderr=pipe, env=env, text=True
    )
    assert producer.stdout is not None
    assert producer.stderr is not None
    reader = subprocess.Popen(
        command("read", url, jobs),
        stdin=producer.stdout,
        stdout=pipe,
        env=env,
        text=True,
    )
    producer.stdout.close()
    try:
        read = report_of(reader)
        submitted = json.loads(producer.stderr.read().strip().splitlines()[-1])
    finally:
        for running in (reader, producer):
            running.kill()
            running.wait()
    if read["read"] != jobs:
        raise SystemExit(f"{read['read']} results of {jobs} were read")
    return submitted, read


def ours(*arguments: object) -> list[str]:
    """How tokenmill's clients are run."""
    return [sys.executable, str(HERE / "queue_client.py"), *map(str, arguments)]


def figures(
    submitted: Mapping[str, float],
    read: Mapping[str, float],
    jobs: int,
    servers: Mapping[str, float],
) -> Figures:
    """Rates, and processor time per job of each process.

    Args:
        submitted: The producer's report.
        read: The reader's.
        jobs: How many.
        servers: Processor seconds of the other parts meanwhile.
    """
    cpu = {**servers, "producer": submitted["cpu_s"], "reader": read["cpu_s"]}
    per_job = {name: round(seconds / jobs * 1e6) for name, seconds in cpu.items()}
    return {
        "jobs": jobs,
        "compared": read["read"],
        "wrong": read["wrong"],
        "jobs_per_s": round(jobs / (read["ended"] - submitted["began"])),
        "submit_jobs_per_s": round(jobs / submitted["submit_s"]),
        "cpu_us_per_job": per_job,
        "cpu_us_per_job_in_all": sum(per_job.values()),
    }


def measure_pool(running: Pool, jobs: int) -> Figures:
    """Jobs per second through tokenmill's full path."""
    parts(ours, running.url, WARM_JOBS)
    before = running.cpu_s()
    submitted, read = parts(ours, running.url, jobs)
    used = {name: now - before[name] for name, now in running.cpu_s().items()}
    return figures(submitted, read, jobs, used)


def measure_peer(peer: Peer, jobs: int) -> Figures:
    """Jobs per second through a peer's full path, on a server of its own."""
    with redis_server() as (server, url):
        env = environment(TOKENMILL_BENCH_URL=url)
        with process(peer.command("work", url), env=env, quiet=True) as workers:
            parts(peer.command, url, WARM_JOBS)
            before = cpu_s(server.pid), session_cpu_s(workers.pid)
            submitted, read = parts(peer.command, url, jobs)
            used = {
                "redis": cpu_s(server.pid) - before[0],
                "workers": session_cpu_s(workers.pid) - before[1],
            }
            found = figures(submitted, read, jobs, used)
            return found | {"processed_jobs_per_s": processed(peer, url, jobs)}


def processed(peer: Peer, url: str, jobs: int) -> int:
    """Jobs per second when nobody reads a result.

    The clock stops at the server's last write: a quarter of a second without any ends
    the wait and is left out.
    """
    done = subprocess.run(
        peer.command("produce", url, jobs),
        env=environment(TOKENMILL_BENCH_URL=url),
        capture_output=True,
        text=True,
        check=True,
    )
    submitted = json.loads(done.stderr.strip().splitlines()[-1])
    give_up = time.monotonic() + PROCESSED_S
    seen, last = -1, time.time()
    with redis.Redis.from_url(url) as server:
        while time.monotonic() < give_up:
            now = num_writes(server)
            if now == seen:
                break
            seen, last = now, time.time()
            time.sleep(QUIET_S)
    return round(jobs / (last - float(submitted["began"])))


def num_writes(server: "redis.Redis") -> int:
    """Writes that the server has taken since it started."""
    info = server.info("persistence")
    assert isinstance(info, dict)
    return int(info["rdb_changes_since_last_save"])
