"""Processes of a pool that nobody supervises, each started by the test."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from support.pools import MODEL, clean_environment
from support.waiting import wait_until_sync


class Solo:
    """Starts `tokenmill schedule` and `tokenmill work` on one Redis.

    Args:
        directory: For logs.
        url: Of the pool.
        **env: Settings of every process.
    """

    def __init__(self, directory: Path, url: str, **env: str) -> None:
        self.directory = directory
        self.url = url
        self._env = env
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts a process under a name of its own; its output goes to a file."""
        with self.log(name).open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "tokenmill", *arguments, "--url", self.url],
                env={**clean_environment(), **self._env},
                cwd=self.directory,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.processes[name] = process
        return process

    def schedule(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start(name, "schedule", *arguments)

    def work(self, name: str, engine: str) -> subprocess.Popen[bytes]:
        return self.start(name, "work", "--name", MODEL, "--engine", engine)

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.out"

    def said(self, name: str, what: str) -> bool:
        """Whether a process printed this; it must not have ended before."""
        text = self.log(name).read_text(errors="replace")
        assert what in text or self.processes[name].poll() is None, text
        return what in text

    def wait_ready(self, *names: str, timeout_s: float = 150) -> None:
        for name in names:
            wait_until_sync(
                lambda name=name: self.said(name, "ready: "),
                timeout_s=timeout_s,
                what=f"{name} ready",
            )

    def group(self, name: str) -> str:
        """The group that a worker printed."""
        text = self.log(name).read_text()
        return text.partition("group ")[2].partition(",")[0]

    def cpu_s(self, *names: str) -> dict[str, float]:
        """Processor seconds that each has used."""
        found = {}
        for name in names:
            times = psutil.Process(self.processes[name].pid).cpu_times()
            found[name] = times.user + times.system
        return found

    def logs(self) -> str:
        return "\n".join(
            f"--- {name}\n{self.log(name).read_text(errors='replace')}"
            for name in self.processes
        )


@contextmanager
def solo(directory: Path, url: str, **env: str) -> Iterator[Solo]:
    """The same for a `with` block; what still runs at its end is killed."""
    made = Solo(directory, url, **env)
    try:
        yield made
    except BaseException:
        sys.stdout.write(made.logs())
        raise
    finally:
        for process in made.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
