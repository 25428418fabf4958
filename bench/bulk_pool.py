"""A pool for the bulk benchmark, as a user starts it, and bulk commands against it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from queue_pool import MILL, end, environment, wait_until

START_S = 300.0
"""Longest start: the first one converts the model."""


class BulkPool:
    """`tokenmill up` in a directory of its own.

    Args:
        directory: State and logs.
        running: The supervisor.
    """

    def __init__(self, directory: Path, running: "subprocess.Popen[str]") -> None:
        self.directory = directory
        self.running = running
        self.env = _variables(directory)

    @property
    def url(self) -> str:
        """Where its Redis is."""
        return str(json.loads((self.directory / "pool.json").read_text())["url"])

    def start(
        self, *arguments: object, stdout: int | None = None
    ) -> "subprocess.Popen[str]":
        """Starts `tokenmill bulk` with these arguments."""
        command = [*MILL, "bulk", *map(str, arguments)]
        return subprocess.Popen(command, env=self.env, text=True, stdout=stdout)

    def kill_worker(self) -> None:
        """Kills the worker; the supervisor starts another."""
        said = (self.directory / "up.log").read_text()
        pids = re.findall(r"^worker-0 +pid (\d+)", said, re.M)
        os.kill(int(pids[-1]), signal.SIGKILL)

    def rss_mib(self) -> dict[str, float]:
        """Resident memory of each of its processes, by command, in MiB."""
        found: dict[str, float] = {}
        for child in psutil.Process(self.running.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                name = words[3] if "tokenmill" in words[2:3] else child.name()
                found[name] = child.memory_info().rss / 2**20
        return found


def _variables(directory: Path) -> dict[str, str]:
    return environment(TOKENMILL_POOL_STATE_DIR=str(directory))


@contextlib.contextmanager
def up(model: str, *, engine: str = "", threads: int = 0) -> Iterator[BulkPool]:
    """A pool for the length of a block.

    Args:
        model: What it serves.
        engine: `echo` where no model is wanted.
        threads: Of the worker; 0 is one a core.
    """
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as name:
        directory = Path(name)
        env = _variables(directory)
        if threads:
            env["TOKENMILL_WORKER_THREADS"] = str(threads)
        command = [*MILL, "up", "--model", model]
        command += ["--engine", engine] if engine else []
        with (directory / "up.log").open("w") as log:
            running = subprocess.Popen(
                command,
                env=env,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            _wait_ready(directory, running)
            yield BulkPool(directory, running)
        finally:
            end(running)


def _wait_ready(directory: Path, running: "subprocess.Popen[str]") -> None:
    def is_ready() -> bool:
        said = (directory / "up.log").read_text()
        if running.poll() is not None:
            raise SystemExit(f"the pool did not start:\n{said}")
        return "\nready" in said

    wait_until(is_ready, "the pool", timeout_s=START_S)
