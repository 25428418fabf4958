"""Latency of the full path at a low rate, by stage; for bench/queue.py."""

import json
import subprocess

import redis
from harness import percentile
from queue_pool import client, output_of, report_of

RATE = 50.0
"""Jobs per second of the latency run."""
SCRIPT = "queue_client.py"


def latency(url: str, jobs: int) -> dict[str, object]:
    """From before each submit until a subscriber, in a third process, hears the end.

    Stages by Redis's clock, in whole milliseconds: queue ends with the dispatch,
    dispatch with the start, publish with the end in the subscriber's hands.
    """
    pipe = subprocess.PIPE
    ears = client(SCRIPT, "hear", url, jobs + 1, stdout=pipe)
    assert ears.stdout is not None
    ears.stdout.readline()
    began = report_of(client(SCRIPT, "pace", url, jobs, RATE, stdout=pipe))
    heard = report_of(ears)
    figures: dict[str, object] = dict(percentiles(whole_path(began, heard)))
    for name, times in stages(url, began, heard).items():
        figures[f"{name}_ms"] = {k[:-3]: v for k, v in percentiles(times).items()}
    return figures


def whole_path(began: dict[str, float], heard: dict[str, float]) -> list[float]:
    """Milliseconds from before each submit until its end was heard."""
    return [(heard[job_id] - at) * 1000 for job_id, at in began.items()]


def stages(
    url: str, began: dict[str, float], heard: dict[str, float]
) -> dict[str, list[float]]:
    """Milliseconds that each job spent in each stage."""
    fields = ("dispatched_ms", "started_ms")
    times: dict[str, list[float]] = {"queue": [], "dispatch": [], "publish": []}
    with redis.Redis.from_url(url) as server:
        for job_id, at in began.items():
            found = server.hmget(f"tm:{{echo:0}}:job:{job_id}", fields)
            dispatched, started = map(int, found)
            times["queue"].append(max(dispatched - at * 1000, 0.0))
            times["dispatch"].append(started - dispatched)
            times["publish"].append(heard[job_id] * 1000 - started)
    return times


def percentiles(times_ms: list[float]) -> dict[str, float]:
    """P50, P99 and the largest of some times."""
    return {
        "p50_ms": round(percentile(times_ms, 0.5), 2),
        "p99_ms": round(percentile(times_ms, 0.99), 2),
        "max_ms": round(max(times_ms), 2),
    }


def result_latency(url: str, jobs: int) -> dict[str, float]:
    """From before each submit until its result is read, in one client."""
    running = client(SCRIPT, "results", url, jobs, RATE, stdout=subprocess.PIPE)
    found = percentiles(json.loads(output_of(running)))
    return {f"result_{name}": value for name, value in found.items()}
