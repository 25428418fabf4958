"""One pool for a chaos run: which processes there are, and how they reach Redis."""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import chaos_model
import psutil
import redis
from chaos_client import PRODUCERS
from chaos_plan import STREAMERS
from chaos_pool import Part, redis_part, tokenmill
from chaos_proxy import Proxy
from chaos_truth import KEYS, connect
from harness import free_port

import tokenmill as package

HERE = Path(__file__).parent
MARK = "CHAOS_RUN"
"""Variable that every process of a run carries, so that none is overlooked."""

TRIES = 3
"""A process that ends by itself this often at the start will not start at all."""


@dataclass(frozen=True)
class Options:
    """What a run does."""

    seconds: float = 300.0
    """How long faults are done."""
    seed: int = 1
    jobs: int = 2000
    workers: int = 2
    engine: str = "model"
    every_s: float = 4.5
    """Mean time between faults."""
    lease_s: float = 3.0
    patience_s: float = 600.0
    """After the last fault, until everything must have ended."""
    kinds: tuple[str, ...] = ()
    """Faults of a deck; empty takes all of `chaos_plan.KINDS`."""


class Pool:
    """Everything that runs; inside a `with` block.

    Args:
        options: Of the run.
        directory: Data, logs and journals.
    """

    def __init__(self, options: Options, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.redis = redis_part(directory, self.port, self._env())
        self.proxy = Proxy(self.port)
        self._model = self._make_model()
        self.workers = [self._worker(n) for n in range(options.workers)]
        self.schedulers = [self._scheduler(n) for n in range(2)]
        self.producers = [self._client("producer", n) for n in range(PRODUCERS)]
        self.subscribers = [self._client("subscriber", n) for n in range(STREAMERS)]
        self.canceller = self._client("canceller", 0)
        self._surprises: list[str] = []

    @property
    def clients(self) -> list[Part]:
        """Producers, subscribers and the canceller."""
        return [*self.producers, *self.subscribers, self.canceller]

    @property
    def clients_finished(self) -> bool:
        """Whether all of them have done their work."""
        return all(part.finished for part in self.clients)

    def __enter__(self) -> Self:
        try:
            self.redis.start()
            self._wait(self._answers, 60, "Redis")
            for part in (*self.schedulers, *self.workers):
                part.start()
            self._wait(self._serves, 240, "the pool")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        groups = (self.clients, self.workers, self.schedulers, [self.redis])
        for parts in groups:
            ends = [part.end() for part in parts]
            self._surprises += [end for end in ends if end]
        self.proxy.close()

    def start_clients(self) -> None:
        """Starts those who submit, follow and cancel."""
        options = self._options
        names = [part.name for part in self.clients]
        run = {
            "seed": options.seed,
            "jobs": options.jobs,
            # The last jobs come shortly before the last faults.
            "per_second": options.jobs / max(options.seconds * 0.9, 1.0),
            "began": time.time() + 1.0,
            "urls": {name: self._url_of(name) for name in names},
        }
        (self._directory / "run.json").write_text(json.dumps(run))
        for part in self.clients:
            part.start()

    def tick(self) -> None:
        """Looks after every process: continues, restarts."""
        for part in self._parts():
            part.tick()

    def heal(self) -> None:
        """Waits until nothing is stopped or down any more."""
        self._wait(
            lambda: (
                all(p.finished or (p.pid and not p.stopped) for p in self._parts())
                and self._answers()
                and self._serves()
            ),
            150,
            "every process to be back",
        )

    def surprises(self) -> list[str]:
        """Ends of processes that nobody asked for."""
        return [line for part in self._parts() for line in part.surprises]

    def left_over(self) -> list[str]:
        """After the end: processes that are still there or did not end well."""
        left = list(self._surprises)
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark:
                    left.append(f"a process is left: {process}")
            except psutil.Error:
                continue  # another user's, or gone meanwhile
        return left

    def active_scheduler(self) -> int:
        """Index of the one that took the lease last, by what they logged."""
        fences = [_last_fence(part.log) for part in self.schedulers]
        return fences.index(max(fences))

    def group_of(self, worker: int) -> str:
        """Name of a worker's present group."""
        return f"w-chaos-{worker}-{self.workers[worker].starts}"

    def _parts(self) -> list[Part]:
        return [self.redis, *self.schedulers, *self.workers, *self.clients]

    def _wait(self, ready: Callable[[], object], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not ready():
            for part in self._parts():
                if len(part.surprises) >= TRIES:
                    tail = part.log.read_text(errors="replace")[-1000:]
                    raise SystemExit(f"{part.surprises[-1]}, as before: {tail}")
            if time.monotonic() > end:
                raise SystemExit(f"{what}: not ready after {timeout_s:.0f} s")
            self.tick()
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with connect(self.port) as client:
                return bool(client.ping())
        except (redis.RedisError, OSError):
            return False

    def serves(self, worker: int) -> bool:
        """Whether a worker's present incarnation takes jobs."""
        try:
            with connect(self.port) as client:
                return bool(client.exists(KEYS.group(self.group_of(worker))))
        except (redis.RedisError, OSError):
            return True  # nobody can say; Redis is away

    def _serves(self) -> bool:
        with connect(self.port) as client:
            active = bool(client.hget(KEYS.scheduler, "owner"))
        return active and all(self.serves(n) for n in range(len(self.workers)))

    def _url_of(self, name: str) -> str:
        """Half of all processes go through the proxy: those with odd numbers."""
        port = self.proxy.port if name.endswith(("1", "2")) else self.port
        return f"redis://127.0.0.1:{port}/0"

    def _env(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TOKENMILL_")}
        source = Path(package.__file__).absolute().parent.parent
        path = os.pathsep.join([str(source), kept.get("PYTHONPATH", "")])
        lease_ms = round(self._options.lease_s * 1000)
        settings = {
            "TOKENMILL_WORKER_LEASE_MS": str(lease_ms),
            "TOKENMILL_WORKER_DRAIN_S": "1",
            "TOKENMILL_WORKER_MAX_RUNNING": "8",
            "TOKENMILL_WORKER_NUM_BLOCKS": "2000",
            "TOKENMILL_WORKER_THREADS": "1",
            "TOKENMILL_SCHEDULER_LEADER_LEASE_MS": "1000",
            "TOKENMILL_LOG_FORMAT": "json",
        }
        quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        return kept | settings | quiet | more | {"PYTHONPATH": path, MARK: self._mark}

    def _make_model(self) -> Path | None:
        if not self._options.engine.startswith("model"):
            return None
        return chaos_model.build(self._directory)

    def _worker(self, number: int) -> Part:
        name = f"worker-{number}"
        command = tokenmill("work", "--url", self._url_of(name))
        command += ["--name", chaos_model.MODEL, "--engine", self._options.engine]
        if self._model is not None:
            command += ["--model", str(self._model)]
        return Part(
            name,
            command,
            self._directory,
            lambda start: self._env(
                TOKENMILL_PROC_GROUP=f"w-chaos-{number}-{start}",
            ),
        )

    def _scheduler(self, number: int) -> Part:
        name = f"scheduler-{number}"
        command = tokenmill("schedule", "--url", self._url_of(name))
        return Part(name, command, self._directory, lambda _: self._env())

    def _client(self, kind: str, number: int) -> Part:
        verb = {"producer": "produce", "subscriber": "follow", "canceller": "cancel"}
        name = kind if kind == "canceller" else f"{kind}-{number}"
        command = [sys.executable, str(HERE / "chaos_client.py"), verb[kind]]
        command += [str(number), str(self._directory)]
        return Part(name, command, self._directory, lambda _: self._env(), once=True)


def _last_fence(log: Path) -> int:
    found = re.findall(
        r'"fence":(\d+),"event":"active"', log.read_text(errors="replace")
    )
    return int(found[-1]) if found else 0
