"""A pool whose workers are started, stopped and killed one by one by a test."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from tokenmill.shared.keys import Keys

from .pools import UpProcess, clean_environment, up
from .waiting import wait_until_sync

INJECTED = Path(__file__).parent / "injected"
"""A directory on whose account worker processes have faults; see there."""
MODEL = "tiny"
"""What the pool of `tiny_pool.py` serves..."""
LEASE_S = 1.5
"""...and how long a worker of it may be silent."""


def with_faults() -> dict[str, str]:
    """Variables under which Python loads `injected/sitecustomize.py`."""
    path = clean_environment()["PYTHONPATH"]
    return {"PYTHONPATH": os.pathsep.join([str(INJECTED), path])}


class WorkerProcess:
    """One `tokenmill work`, its output in a file."""

    def __init__(
        self, pool: "FaultPool", name: str, arguments: list[str], env: dict[str, str]
    ) -> None:
        self.group = f"w-{name}"
        self.output = pool.directory / f"{name}.out"
        self._keys = pool.keys
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tokenmill", "work", "--name", pool.model),
                    *arguments,
                ],
                env={
                    **clean_environment(),
                    **with_faults(),
                    "TOKENMILL_URL": pool.url,
                    "TOKENMILL_PROC_GROUP": self.group,
                    **pool.settings,
                    **env,
                },
                cwd=pool.directory,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 150) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.text
            return "ready: " in self.text

        wait_until_sync(ready, timeout_s=timeout_s, what=f"a worker\n{self.text}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


class FaultPool:
    """Redis, a scheduler, and workers.

    Args:
        pool: `tokenmill up --no-worker`.
        model: Public name of what the workers serve.
        arguments: For every worker.
        settings: Variables for every worker.
    """

    def __init__(
        self, pool: UpProcess, model: str, arguments: list[str], settings: dict
    ) -> None:
        self.up = pool
        self.directory = pool.directory
        self.url = pool.url
        self.model = model
        self.keys = Keys(model, 0)
        self.arguments = arguments
        self.settings = settings
        self.workers: list[WorkerProcess] = []
        self.redis = redis.Redis.from_url(self.url)

    def start_worker(self, *arguments: str, **env: str) -> WorkerProcess:
        name = f"worker{len(self.workers)}"
        chosen = [*self.arguments, *arguments]
        self.workers.append(WorkerProcess(self, name, chosen, env))
        return self.workers[-1]

    def ready_worker(self, *arguments: str, **env: str) -> WorkerProcess:
        worker = self.start_worker(*arguments, **env)
        worker.wait_ready()
        return worker

    def record(self, job_id: str) -> dict[str, str]:
        fields = self.redis.hgetall(self.keys.job(job_id))
        return {key.decode(): value.decode() for key, value in fields.items()}

    def group(self, worker: WorkerProcess) -> dict[str, str]:
        fields = self.redis.hgetall(self.keys.group(worker.group))
        return {key.decode(): value.decode() for key, value in fields.items()}

    def owner(self, job_id: str) -> str:
        return self.record(job_id).get("owner", "")

    @contextmanager
    def held(self, prompt: str, tokens: int, requests: int = 1) -> Iterator[None]:
        """Lets a worker make no step once a prompt has so many tokens.

        By then so many requests are in its engine, none of which ends in this block;
        its leases are renewed.

        Args:
            prompt: A word of it.
            tokens: Of its output, before which the worker goes on.
            requests: That must be there before it is held.
        """
        file, new = self.directory / "hold", self.directory / "hold.new"
        new.write_text(f"{prompt} {tokens} {requests}")
        new.replace(file)
        try:
            yield
        finally:
            file.unlink()

    def end_workers(self) -> None:
        for worker in self.workers:
            worker.end()


@contextmanager
def fault_pool(
    directory: Path, model: str, *arguments: str, own: bool = False, **settings: str
) -> Iterator[FaultPool]:
    """A pool for the length of a `with` block.

    Without workers; `own`: with those of its settings, which it restarts.
    """
    quick = {"TOKENMILL_SCHEDULER_LEADER_LEASE_MS": "1000"}
    kind = ("--engine", "model") if own else ("--no-worker",)
    with up(directory, *kind, **quick, **settings) as process:
        made = FaultPool(process, model, list(arguments), settings)
        try:
            yield made
        except BaseException:
            for worker in made.workers:
                sys.stdout.write(f"--- {worker.output.name}\n{worker.text}\n")
            raise
        finally:
            made.end_workers()
            made.redis.close()
