"""The processes of a chaos run: started, hurt on purpose, started again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import redis_servers

from tokenmill.shared.pool.orphans import die_with_parent

RESTART_S = 0.5
"""From a process's end until it is started again."""
NO_REDIS = 3
"""Exit code of a process that finds no Redis when it starts."""


class Part:
    """One process that may die and come back.

    Args:
        name: Of its log file.
        command: What to run.
        directory: Where the log goes.
        env: Called with the number of the incarnation; its environment.
        once: It ends by itself with code 0 when its work is done.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        directory: Path,
        env: Callable[[int], Mapping[str, str]],
        *,
        once: bool = False,
    ) -> None:
        self.name = name
        self.command = command
        self.log = directory / f"{name}.log"
        self.once = once
        self.starts = 0
        self.finished = False
        self.surprises: list[str] = []
        """Ends that nobody asked for."""
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._expected: tuple[int, ...] = ()
        self._log_start = 0
        # From the thread that lives as long as the bench: the kernel means threads.
        self._dies_with_us = die_with_parent(signal.SIGKILL)
        self._continue_at: float | None = None
        self._start_at: float | None = None

    def start(self) -> None:
        """Starts the next incarnation."""
        self.starts += 1
        self._expected = (0,) if self.once else ()
        self._start_at = None
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.command,
                env=dict(self._env(self.starts)),
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=self._dies_with_us,  # noqa: PLW1509 - one system call
            )

    @property
    def pid(self) -> int | None:
        """Process id while it runs, stopped or not."""
        alive = self._process is not None and self._process.poll() is None
        return self._process.pid if alive and self._process is not None else None

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP holds it."""
        return self._continue_at is not None

    def kill(self, away_s: float = RESTART_S) -> bool:
        """SIGKILL; it comes back after `away_s`. False when it does not run."""
        return self._signal(signal.SIGKILL, (-signal.SIGKILL,), away_s)

    def term(self, away_s: float = RESTART_S) -> bool:
        """SIGTERM, which a server answers with a clean end."""
        return self._signal(signal.SIGTERM, (0, -signal.SIGTERM), away_s)

    def stop(self, for_s: float) -> bool:
        """SIGSTOP, and SIGCONT after `for_s`."""
        if self.pid is None or self.stopped:
            return False
        os.kill(self.pid, signal.SIGSTOP)
        self._continue_at = time.monotonic() + for_s
        return True

    def _signal(self, number: int, codes: tuple[int, ...], away_s: float) -> bool:
        if self.pid is None or self.stopped:
            return False
        self._expected += codes
        self._start_at = time.monotonic() + away_s
        os.kill(self.pid, number)
        return True

    def tick(self) -> None:
        """Continues what was stopped for long enough, restarts what ended."""
        now = time.monotonic()
        if self._continue_at is not None and now >= self._continue_at:
            self._continue_at = None
            if self.pid is not None:
                os.kill(self.pid, signal.SIGCONT)
        if self._process is None or self.finished or self.pid is not None:
            return
        code = self._process.returncode
        if self.once and code == 0:
            self.finished = True
            return
        if code == NO_REDIS and not self._worked():
            self._expected += (code,)  # it may say so, and is started again
        if code not in self._expected:
            self.surprises.append(f"{self.name} ended by itself with code {code}")
            self._expected += (code,)
        if self._start_at is None:
            self._start_at = now + RESTART_S
        elif now >= self._start_at:
            self.start()

    def _worked(self) -> bool:
        """Whether the present incarnation had come as far as its work."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            text = log.read()
        return b'"worker_ready"' in text or b'"shard_found"' in text

    def end(self, timeout_s: float = 20) -> str | None:
        """Asks it to end, for good; says what was wrong with that."""
        self.finished = True
        if self._process is None or self._process.poll() is not None:
            return None
        if self.stopped:
            self._continue_at = None
            os.kill(self._process.pid, signal.SIGCONT)
        self._process.terminate()
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"{self.name} did not end within {timeout_s:.0f} s of SIGTERM"
        ok = code in (0, -signal.SIGTERM)
        return None if ok else f"{self.name} ended with code {code} after SIGTERM"


def redis_part(directory: Path, port: int, env: Mapping[str, str]) -> Part:
    """Redis that acknowledges nothing before it is on disk."""
    data = directory / "redis"
    data.mkdir()
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    command = redis_servers.command(port, data, *durable)
    return Part("redis", command, directory, lambda _: env)


def tokenmill(*arguments: str) -> list[str]:
    """The command line of a tokenmill process."""
    return [sys.executable, "-m", "tokenmill", *arguments]
