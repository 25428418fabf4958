"""Processes of a pool for the queue's benchmarks: Redis, scheduler, workers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis_servers import running

HERE = Path(__file__).parent
MILL = (sys.executable, "-m", "tokenmill")
Process = "subprocess.Popen[str]"
_UP_S = 60.0
"""Longest wait for processes to come up."""


def environment(**more: str) -> dict[str, str]:
    """Variables of every process here: quiet, and nothing from a hub."""
    variables = {**os.environ, "TOKENMILL_LOG_LEVEL": "warning"}
    return variables | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"} | more


@contextlib.contextmanager
def process(
    command: Sequence[str], *, quiet: bool = False, env: dict[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """A process, and all it starts, for the length of a block; ended with SIGTERM."""
    sink = subprocess.DEVNULL if quiet else None
    part = subprocess.Popen(
        list(command),
        stdout=sink,
        stderr=sink,
        env=env or environment(),
        text=True,
        start_new_session=True,
    )
    try:
        yield part
    finally:
        end(part)


def end(part: "subprocess.Popen[str]") -> None:
    """Ends a process that leads its session, and whatever is left of that session."""
    with contextlib.suppress(ProcessLookupError):
        part.terminate()
    try:
        part.wait(20)
    except subprocess.TimeoutExpired:
        part.kill()
        part.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(part.pid, signal.SIGKILL)


@contextlib.contextmanager
def redis_server(*more: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """The embedded server, as `tokenmill up` would run it; yields its URL too.

    Args:
        more: Further arguments of the server.
    """
    with running("--appendonly", "yes", *more) as found:
        yield found


def wait_until(condition: "object", what: str, *, timeout_s: float = _UP_S) -> None:
    """Returns once a condition holds; ends the benchmark when it does not in time."""
    assert callable(condition)
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            raise SystemExit(f"{what}: not so after {timeout_s:.0f} s")
        time.sleep(0.05)


@dataclass
class Pool:
    """One scheduler and some workers of the echo engine on a server of their own."""

    url: str
    parts: dict[str, "subprocess.Popen[Any]"] = field(default_factory=dict)
    """Processes by name."""

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds of each part so far."""
        return {name: cpu_s(part.pid) for name, part in self.parts.items()}

    def rss_mib(self) -> dict[str, float]:
        """Resident memory of each part now."""
        return {name: rss_mib(part.pid) for name, part in self.parts.items()}


@contextlib.contextmanager
def pool(
    *,
    engine: str = "echo",
    workers: int = 1,
    standby: bool = False,
    janitor: bool = False,
    server: Sequence[str] = (),
    **variables: str,
) -> Iterator[Pool]:
    """Starts a pool and yields it once its workers are there.

    Args:
        engine: Of every worker.
        workers: How many; 0 for none.
        standby: Whether a second scheduler waits.
        janitor: Whether a janitor cleans up.
        server: Further arguments of the Redis server.
        variables: Further environment variables of scheduler and workers.
    """
    env = environment(**variables)
    with contextlib.ExitStack() as stack:
        redis_process, url = stack.enter_context(redis_server(*server))
        made = Pool(url, {"redis": redis_process})
        schedule = [*MILL, "schedule", "--url", url]
        made.parts["scheduler"] = stack.enter_context(process(schedule, env=env))
        for number in range(workers):
            name = "worker" if workers == 1 else f"worker-{number + 1}"
            made.parts[name] = stack.enter_context(worker(url, engine, env=env))
        if standby:
            second = process([*schedule, "--standby"], env=env)
            made.parts["standby"] = stack.enter_context(second)
        if janitor:
            cleaner = process([*MILL, "janitor", "--url", url], env=env)
            made.parts["janitor"] = stack.enter_context(cleaner)
        with redis.Redis.from_url(url) as client:
            wait_until(
                lambda: (
                    client.zcard("tm:{echo:0}:groups") >= workers
                    and client.exists("tm:pool")
                ),
                "scheduler and workers",
            )
        yield made


def worker(
    url: str, engine: str = "echo", *, env: dict[str, str] | None = None
) -> "contextlib.AbstractContextManager[subprocess.Popen[str]]":
    """Starts a worker for the length of a block."""
    return process(
        [*MILL, "work", "--engine", engine, "--name", "echo", "--url", url], env=env
    )


def cpu_s(pid: int) -> float:
    """Processor seconds a process has used, on Linux; 0 elsewhere."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def session_cpu_s(leader: int) -> float:
    """Processor seconds of all living processes of a session, on Linux."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                total += cpu_s(int(stat.parent.name))
    return total


def rss_mib(pid: int) -> float:
    """Resident memory of a process in MiB, on Linux; 0 elsewhere."""
    statm = Path(f"/proc/{pid}/statm")
    try:
        pages = int(statm.read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def client(script: str, *arguments: object, **pipes: object) -> "subprocess.Popen[str]":
    """Starts a script of this folder with these arguments."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def output_of(part: "subprocess.Popen[str]", timeout_s: float = 600) -> str:
    """What a client process printed last."""
    output, _ = part.communicate(timeout=timeout_s)
    if part.returncode:
        raise SystemExit(f"{part.args!r} ended with {part.returncode}")
    return str(output).strip().splitlines()[-1]


def report_of(
    part: "subprocess.Popen[str]", timeout_s: float = 600
) -> dict[str, float]:
    """The JSON object that a client process printed last."""
    return json.loads(output_of(part, timeout_s))  # type: ignore[no-any-return]
