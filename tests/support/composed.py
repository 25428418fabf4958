"""The services of docker-compose.yml as processes of this host.

Commands, environments, health checks and the way to stop are taken from the file. What
differs is what a container would hide: addresses, ports and directories are this
test's own, and the worker has an engine without a model.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from . import compose
from .pools import clean_environment
from .servers import free_port, server_binary
from .waiting import wait_until_sync

ADMIN = "an-administrator-of-this-test"
MODEL = "echo"


@dataclass
class Service:
    """One container's process."""

    name: str
    spec: dict[str, Any]
    command: list[str]
    env: dict[str, str]
    log: Path
    metrics_port: int = 0
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                cwd=self.log.parent,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """`docker compose run --rm <service> tokenmill …`."""
        return subprocess.run(
            [*_python(), *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    def is_well(self) -> bool:
        """Runs the health check's command once."""
        assert self.process is not None
        assert self.process.poll() is None, f"{self.name} ended\n{self.text}"
        kind, *words = self.spec["healthcheck"]["test"]
        command = ["sh", "-c", *words] if kind == "CMD-SHELL" else _ours(words)
        if kind == "CMD" and words[-1] == "scheduler":
            command += ["--pid", str(self.process.pid)]  # two share this host's name
        done = subprocess.run(
            command,
            env=self.env,
            capture_output=True,
            timeout=compose.seconds(self.spec["healthcheck"]["timeout"]) + 20,
            check=False,
        )
        return done.returncode == 0

    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> int:
        """SIGTERM, as `docker stop` sends it; the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(compose.seconds(self.spec["stop_grace_period"]))

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Composition:
    """All services, by name; a service with replicas has a number after its name."""

    directory: Path
    redis_port: int
    services: dict[str, Service] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    """API keys of the gateway, by what they are for."""

    def url(self, role: str) -> str:
        password = compose.passwords()[f"REDIS_{role.upper()}_PASSWORD"]
        return f"redis://{role}:{password}@127.0.0.1:{self.redis_port}/0"

    def secrets(self) -> list[str]:
        """What no log may show."""
        made = compose.passwords()
        words = [
            value
            for name, value in made.items()
            if name.endswith(("PASSWORD", "SECRET"))
        ]
        return [*words, *self.keys.values(), ADMIN]

    def admin(self) -> "redis.Redis":
        """A client that may do everything, to look behind the roles."""
        return redis.Redis(port=self.redis_port, username="admin", password=ADMIN)

    def denied(self) -> list[str]:
        """What the server refused to a role, other than what a test tried."""
        with self.admin() as client:
            return [
                f"{entry['username']}: {entry['reason']} {entry['object']} "
                f"({entry['context']}, {entry['client-info'].get('cmd', '')})"
                for entry in client.acl_log()
            ]

    def wait_well(self, *names: str) -> None:
        for name in names:
            service = self.services[name]
            wait_until_sync(service.is_well, every_s=0.2, what=f"{name} well")

    def logs(self) -> str:
        return "\n".join(f"--- {s.name}\n{s.text}" for s in self.services.values())


def _python() -> list[str]:
    return [sys.executable, "-m", "tokenmill"]


def _ours(words: Sequence[str]) -> list[str]:
    assert words[0] == "tokenmill", words
    return [*_python(), *words[1:]]


def redis_start(directory: Path, version: str) -> tuple[list[str], dict[str, str]]:
    """deploy/redis/start.sh with its neighbours, and a user for the test beside ours.

    Args:
        directory: Gets the copy, and programs for PATH.
        version: Of the server.

    Returns:
        The command, and what its environment needs besides passwords.
    """
    home, programs = directory / "etc", directory / "bin"
    shutil.copytree(compose.ROOT / "deploy/redis", home)
    with (home / "users.acl").open("a", encoding="utf-8") as users:
        users.write("\nuser admin on resetkeys resetchannels ~* &* +@all\n")
    programs.mkdir()
    (programs / "redis-server").symlink_to(server_binary(version))
    client = programs / "redis-cli"
    real = Path(server_binary("6.2")).with_name("redis-cli")
    client.write_text(f'#!/bin/sh\nexec {real} -p "$PORT" "$@"\n')
    client.chmod(0o755)
    env = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "LC_ALL": "C",
        "TMPDIR": str(directory),
        "REDIS_ADMIN_PASSWORD": ADMIN,
    }
    return ["sh", str(home / "start.sh")], env


@contextmanager
def composed(directory: Path, version: str) -> Iterator[Composition]:
    """Services made ready to start, Redis started; nothing of them remains.

    Args:
        directory: For everything that they write.
        version: Of Redis.
    """
    own = {"TOKENMILL_MODELS": MODEL, "WEBHOOKS_ALLOW_PRIVATE": "true"}
    values = {**compose.passwords(), **own}
    specs = compose.read(values)["services"]
    whole = Composition(directory, free_port())
    server, extra = redis_start(directory, version)
    for name in ("redis", "scheduler", "janitor", "worker", "gateway"):
        spec = specs[name]
        count = spec.get("deploy", {}).get("replicas", 1)
        for index in range(count):
            own = name if count == 1 else f"{name}-{index + 1}"
            whole.services[own] = _service(own, spec, whole)
    store = whole.services["redis"]
    store.env |= {**extra, "PORT": str(whole.redis_port)}
    data = directory / "data"
    data.mkdir()
    places = ("--port", str(whole.redis_port), "--bind", "127.0.0.1")
    store.command = [*server, *places, "--dir", str(data)]
    with ExitStack() as stack:
        stack.callback(_end, whole)
        try:
            store.start()
            whole.wait_well("redis")
            yield whole
        except BaseException:
            sys.stdout.write(whole.logs())
            sys.stdout.write("\n".join(["--- refused by Redis", *whole.denied(), ""]))
            raise


def _service(name: str, spec: dict[str, Any], whole: Composition) -> Service:
    """A service whose container's addresses and directories are this host's."""
    home = whole.directory / name
    home.mkdir()
    env = {k: str(v) for k, v in spec["environment"].items()}
    service = Service(name, spec, [], {**clean_environment(), **env}, home / "log")
    if "TOKENMILL_URL" in env:
        there = f"@127.0.0.1:{whole.redis_port}/"
        service.env["TOKENMILL_URL"] = env["TOKENMILL_URL"].replace(
            "@redis:6379/", there
        )
        service.metrics_port = free_port()
        service.env |= {
            "TOKENMILL_METRICS_HOST": "127.0.0.1",
            "TOKENMILL_METRICS_PORT": str(service.metrics_port),
            "TOKENMILL_POOL_STATE_DIR": str(home),
        }
        service.command = _ours(spec["command"])
    if name == "worker":
        service.command += ["--engine", "echo:5"]
    if name == "gateway":
        service.env |= {
            "TOKENMILL_GATEWAY_HOST": "127.0.0.1",
            "TOKENMILL_GATEWAY_PORT": str(free_port()),
        }
    return service


def _end(whole: Composition) -> None:
    """Ends what a test left running, Redis last."""
    for service in reversed(whole.services.values()):
        if service.process is not None and service.runs():
            service.process.kill()
            service.process.wait()
