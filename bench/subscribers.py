"""A thousand subscribers on live streams: how late does a token arrive?

    python bench/subscribers.py [--subscribers 1000] [--jobs 500] [--report]

Every subscriber follows one job with `Job.stream`; several processes hold some hundred
each, and several subscribers may follow one job. The worker runs the echo engine with
a fixed time a step, so every job produces a token a step. Its engine is wrapped: the
time at which a step ends is kept by job and offset. A token's delay is from there, over
the worker's joining of deltas, the script, Redis and the client, until `async for` has
it, by the machine's monotonic clock, which all processes share.

The baseline is redis-py's own pub/sub with as many subscribers, in as many processes:
each with a connection of its own, which gets a message a step, its delay counted from
before the PUBLISH. The last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import redis
from harness import finish, machine, new_parser, percentile, show
from queue_pool import (
    HERE,
    client,
    end,
    environment,
    output_of,
    pool,
    redis_server,
    rss_mib,
    wait_until,
)
from subscribers_client import LINE

TARGET_MS = 250.0
"""No token later than this at P99."""
CONNECTIONS_OF_WORKER = 10
"""A worker comes between the two counts: this many of its own at most."""
SCRIPT = "subscribers_client.py"
Times = dict[str, list[float]]
"""Monotonic seconds of each token, by job."""


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--subscribers", type=int, default=1_000)
    add("--jobs", type=int, default=500, help="jobs that are followed")
    add("--processes", type=int, default=4, help="that hold the subscribers")
    add("--tokens", type=int, default=40, help="of each job, one a step")
    add("--step-ms", type=int, default=500, help="time of a step of the engine")
    add("--report", action="store_true", help="save the figures in bench/results")
    return parser.parse_args()


def followed(options: argparse.Namespace) -> list[int]:
    """How many subscribers each process has."""
    whole, rest = divmod(options.subscribers, options.processes)
    return [whole + (number < rest) for number in range(options.processes)]


class Followers:
    """Client processes with subscribers, until each has printed what it saw."""

    def __init__(
        self, kind: str, url: str, options: argparse.Namespace, ids: list[str]
    ) -> None:
        self._running: list[subprocess.Popen[str]] = []
        first = 0
        for count in followed(options):
            mine = [ids[(first + n) % len(ids)] for n in range(count)]
            first += count
            pipe = subprocess.PIPE
            started = client(SCRIPT, kind, url, stdin=pipe, stdout=pipe)
            assert started.stdin is not None
            started.stdin.write(json.dumps(mine) + "\n")
            started.stdin.flush()
            self._running.append(started)

    def wait_ready(self) -> None:
        """Returns once every subscriber hears."""
        for running in self._running:
            assert running.stdout is not None
            if running.stdout.readline().strip() != LINE:
                raise SystemExit("a client process did not come up")

    def rss_mib(self) -> float:
        """Resident memory of all of them."""
        return sum(rss_mib(running.pid) for running in self._running)

    def seen(self) -> Iterator[tuple[str, list[float]]]:
        """Yields, for each subscriber, its job and when it had each token."""
        for running in self._running:
            yield from json.loads(output_of(running))

    def end(self) -> None:
        """Ends what is left of them."""
        for running in self._running:
            if running.poll() is None:
                running.kill()
                running.wait()


def delays_ms(
    made: Times, seen: Iterable[tuple[str, list[float]]], tokens: int
) -> tuple[list[float], list[str]]:
    """Delay of every token at every subscriber, and what was wrong."""
    delays: list[float] = []
    problems: list[str] = []
    for job_id, times in seen:
        if len(times) != tokens or len(made[job_id]) != tokens:
            problems.append(f"{job_id}: {len(times)} tokens of {tokens}")
            continue
        pairs = zip(times, made[job_id], strict=True)
        delays += [(at - before) * 1000 for at, before in pairs]
    return delays, problems


def summary(delays: list[float]) -> dict[str, object]:
    """Percentiles of delays in milliseconds."""
    return {
        "deliveries": len(delays),
        "p50_ms": round(percentile(delays, 0.5), 2),
        "p99_ms": round(percentile(delays, 0.99), 2),
        "max_ms": round(max(delays), 2),
    }


def connections(url: str) -> dict[str, int]:
    """Connections of the server now, in all and in pub/sub mode."""
    with redis.Redis.from_url(url) as server:
        info = cast("dict[str, int]", server.info("clients"))
        return {
            "connections": info["connected_clients"],
            "pubsub_connections": info["pubsub_clients"],
        }


def watched(
    url: str,
    followers: Followers,
    options: argparse.Namespace,
    begin: Callable[[], None],
) -> dict[str, object]:
    """Starts the stream once all are subscribed; connections and memory meanwhile."""
    before = connections(url)
    followers.wait_ready()
    begin()
    time.sleep(options.tokens * options.step_ms / 1000 / 2)
    during, rss = connections(url), followers.rss_mib()
    return {
        "connections_of_subscribers": during["connections"] - before["connections"],
        "pubsub_connections": during["pubsub_connections"],
        "clients_rss_mib": round(rss, 1),
    }


def ours(options: argparse.Namespace) -> tuple[dict[str, object], list[str]]:
    """Subscribers of tokenmill."""
    wanted = str(max(options.jobs, 1))
    with pool(workers=0) as running, tempfile.TemporaryDirectory() as directory:
        made = Path(directory, "made.json")
        submit = client(
            SCRIPT,
            *("submit", running.url, options.jobs, options.tokens),
            stdout=subprocess.PIPE,
        )
        ids = json.loads(output_of(submit))
        workers: list[subprocess.Popen[str]] = []

        def begin() -> None:
            command = [sys.executable, str(HERE / "subscribers_worker.py"), running.url]
            command += [str(options.step_ms), str(made)]
            env = environment(TOKENMILL_WORKER_MAX_RUNNING=wanted)
            workers.append(
                subprocess.Popen(command, env=env, text=True, start_new_session=True)
            )
            with redis.Redis.from_url(running.url) as server:
                wait_until(lambda: server.zcard("tm:{echo:0}:groups"), "worker")

        followers = Followers("follow", running.url, options, ids)
        try:
            found = watched(running.url, followers, options, begin)
            seen = list(followers.seen())
        finally:
            followers.end()
            for one in workers:
                end(one)
        delays, problems = delays_ms(json.loads(made.read_text()), seen, options.tokens)
        return summary(delays) | found, problems


def plain(options: argparse.Namespace) -> tuple[dict[str, object], list[str]]:
    """As many subscribers of redis-py, on the same kind of server."""
    with redis_server() as (_, url):
        ids = [f"plain:{number}" for number in range(options.jobs)]
        publishers: list[subprocess.Popen[str]] = []

        def begin() -> None:
            publishers.append(
                client(
                    SCRIPT,
                    *("publish", url, options.jobs, options.tokens, options.step_ms),
                    stdout=subprocess.PIPE,
                )
            )

        followers = Followers("plain", url, options, ids)
        try:
            found = watched(url, followers, options, begin)
            made = json.loads(output_of(publishers[0]))
            seen = list(followers.seen())
        finally:
            followers.end()
        delays, problems = delays_ms(made, seen, options.tokens)
        return summary(delays) | found, problems


def main() -> int:
    """Runs both sides and prints the figures as one line of JSON."""
    options = arguments()
    report: dict[str, object] = {
        "benchmark": "subscribers",
        "machine": machine(),
        **{name: value for name, value in vars(options).items() if name != "report"},
        "target_p99_ms": TARGET_MS,
    }
    problems: list[str] = []
    for name, side in (("tokenmill", ours), ("plain_pubsub", plain)):
        found, wrong = side(options)
        show(name, found)
        report[name] = found
        problems += wrong
    mine = cast("dict[str, float]", report["tokenmill"])
    if mine["p99_ms"] > TARGET_MS:
        problems.append(f"P99 is {mine['p99_ms']} ms; the target is {TARGET_MS:.0f} ms")
    # Of a process: one that listens, two that read the logs in the beginning.
    most = 3 * options.processes + CONNECTIONS_OF_WORKER
    if mine["connections_of_subscribers"] > most:
        problems.append("the connections grow with the subscribers")
    report["problems"] = problems
    return finish(report, save=options.report)


if __name__ == "__main__":
    sys.exit(main())
