"""The pool that the load test sends to: one of its own, or one that is named."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from harness import free_port

from tokenmill.shared.connection import read_connection

MILL = (sys.executable, "-m", "tokenmill")
READY_S = 120.0
"""A model may have to be converted first."""
_SAMPLE_S = 0.5


@dataclass
class Target:
    """Where requests go."""

    model: str
    url: str | None = None
    """Redis; None: the client is left out."""
    gateway: str | None = None
    """Address without a path; None: the gateway is left out."""
    key: str | None = None
    roots: list[int] = field(default_factory=list)
    """Processes whose memory is ours to measure; none of a pool that was named."""

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of each kind of process now; empty for a foreign pool."""
        found: defaultdict[str, float] = defaultdict(float)
        for pid in self.roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                for process in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        rss = process.memory_info().rss
                        found[_kind(process.cmdline())] += rss / 2**20
        return {name: round(value, 1) for name, value in found.items()}


def _kind(command: list[str]) -> str:
    """`tokenmill work …` is a worker, whatever starts it."""
    names = {"work": "worker", "schedule": "scheduler", "up": "supervisor"}
    if "tokenmill" in command:
        word = command[command.index("tokenmill") + 1]
        return names.get(word, word)
    return "redis" if command and "redis" in command[0] else "other"


class Peak:
    """The most memory that each kind of process had while a block ran."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.mib: dict[str, float] = {}

    async def watch(self) -> None:
        """Looks again and again until cancelled."""
        while True:
            now = await asyncio.to_thread(self._target.memory_mib)
            for kind, value in now.items():
                self.mib[kind] = max(value, self.mib.get(kind, 0.0))
            await asyncio.sleep(_SAMPLE_S)


@contextlib.contextmanager
def own_pool(
    directory: Path, *, engine: str, model: str, batch_size: int
) -> Iterator[Target]:
    """A pool and a gateway of this run's own, until the block ends.

    Args:
        directory: For their state and logs.
        engine: `model`, `echo` or `echo:<ms per step>`.
        model: What the worker serves.
        batch_size: Sequences in a step at most.
    """
    port = free_port()
    env = {
        **os.environ,
        "TOKENMILL_POOL_STATE_DIR": str(directory),
        "TOKENMILL_LOG_LEVEL": "warning",
        "TOKENMILL_WORKER_MAX_RUNNING": str(batch_size),
        "TOKENMILL_GATEWAY_PORT": str(port),
        "HF_HUB_OFFLINE": "1",
    }
    env.pop("TOKENMILL_URL", None)
    ready, log = directory / "ready", directory / "load.log"
    ready.unlink(missing_ok=True)
    up = (*MILL, "up", "--model", model, "--engine", engine, "--ready-file", str(ready))
    with contextlib.ExitStack() as stack, log.open("wb") as sink:
        pool = stack.enter_context(running_process(up, env, sink))
        wait_ready(ready.exists, pool, log)
        connection = read_connection(directory)
        assert connection is not None, "the pool says that it is ready and is not there"
        gateway = stack.enter_context(
            running_process(
                (*MILL, "gateway"), {**env, "TOKENMILL_URL": connection.url}, sink
            )
        )
        base = f"http://127.0.0.1:{port}"
        wait_ready(lambda: _answers(f"{base}/readyz"), gateway, log)
        yield Target(model, connection.url, base, roots=[pool.pid, gateway.pid])


@contextlib.contextmanager
def running_process(
    command: tuple[str, ...], env: dict[str, str], sink: object
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process for the length of a block; what it prints goes to `sink`."""
    process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(
    condition: object,
    process: "subprocess.Popen[bytes]",
    log: Path,
    ready_s: float = READY_S,
) -> None:
    """Returns once a condition holds; ends the run with the log when it cannot."""
    assert callable(condition)
    end = time.monotonic() + ready_s
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            tail = log.read_text(errors="replace")[-2000:]
            raise SystemExit(f"{process.args!r} did not come up:\n{tail}")
        time.sleep(0.05)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
