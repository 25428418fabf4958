"""A whole pool of real processes, with an engine that needs no model."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

import tokenmill

from .waiting import wait_until_sync

MODEL = "echo"


def clean_environment() -> dict[str, str]:
    """For children in another directory: no settings of ours, the same package."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOKENMILL_")}
    source = Path(tokenmill.__file__).absolute().parent.parent
    kept["PYTHONPATH"] = os.pathsep.join([str(source), kept.get("PYTHONPATH", "")])
    return kept


class UpProcess:
    """`tokenmill up` as a child, and what it printed."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        engine: str = "echo",
        janitor: bool = False,
        **env: str,
    ) -> None:
        self.directory = directory
        self.printed = directory / "up.out"
        state = {"TOKENMILL_POOL_STATE_DIR": str(directory)}
        self.env = {**clean_environment(), **state, **env}
        with self.printed.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tokenmill", "up"),
                    *(() if janitor else ("--no-janitor",)),
                    *("--model", MODEL, "--engine", engine),
                    *arguments,
                ],
                env=self.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=directory,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.printed.read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 150) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.text
            return "\nready" in self.text

        wait_until_sync(ready, timeout_s=timeout_s, what=f"the pool\n{self.text}")

    @property
    def gateway(self) -> str:
        """Where its gateway answers, as `up` prints it."""
        line = re.compile(r"^gateway +\| gateway (http://\S+)$", re.M)
        found = wait_until_sync(
            lambda: line.search(self.text), what="the gateway's address"
        )
        return str(found[1])

    @property
    def url(self) -> str:
        return json.loads((self.directory / "pool.json").read_text())["url"]

    def pids(self, name: str) -> list[int]:
        """Every process id that a child of this name has had, oldest first."""
        return [int(n) for n in re.findall(rf"^{name} +pid (\d+)", self.text, re.M)]

    def family(self) -> list[psutil.Process]:
        """The supervisor's children and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def logs(self) -> str:
        files = sorted((self.directory / "logs").glob("*.log"))
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')}"
            for path in [self.printed, *files]
        )


@contextmanager
def up(
    directory: Path,
    *arguments: str,
    engine: str = "echo",
    janitor: bool = False,
    **env: str,
) -> Iterator[UpProcess]:
    """A pool that serves, for the length of a `with` block; nothing of it remains."""
    pool = UpProcess(directory, *arguments, engine=engine, janitor=janitor, **env)
    family: list[psutil.Process] = []
    try:
        pool.wait_ready()
        family = pool.family()
        yield pool
    except BaseException:
        sys.stdout.write(pool.logs())
        raise
    finally:
        if pool.process.poll() is None:
            family = pool.family()
            pool.process.terminate()
            try:
                pool.process.wait(60)
            except subprocess.TimeoutExpired:
                pool.process.kill()
                pool.process.wait()
        assert all_gone(family), [str(p) for p in family if p.is_running()]


def last_fence(log: Path) -> int:
    """Which lease the scheduler with this log was given last: later ones are larger."""
    text = log.read_text(errors="replace")
    return max(map(int, re.findall(r'"fence":(\d+),"event":"active"', text)), default=0)


def all_gone(family: list[psutil.Process], timeout_s: float = 60) -> bool:
    """Whether none of these processes runs any more."""
    try:
        wait_until_sync(lambda: not any(map(_runs, family)), timeout_s=timeout_s)
    except AssertionError:
        return False
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
