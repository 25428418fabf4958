"""A pool and a gateway as a user has them, for what runs beside them: examples, load.

The engine gives the prompt back; it goes by the name of the built-in model, which the
examples ask for.
"""

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenmill.shared.connection import read_connection

from .pools import clean_environment
from .servers import free_port
from .waiting import wait_until_sync

MODEL = "smollm2-135m"
STEP_MS = 2


@dataclass
class ExamplePool:
    """Where it is, and what a program beside it has in its environment."""

    url: str
    gateway: str
    origin: str
    """Of pages that may call the gateway from a browser."""
    env: dict[str, str]


def answers(address: str) -> bool:
    """Whether an HTTP server says 2xx there."""
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def process(
    command: list[str], env: dict[str, str], log: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process for the length of a block, ended with SIGTERM."""
    with log.open("wb") as out:
        running = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    try:
        yield running
    except BaseException:
        sys.stdout.write(log.read_text(errors="replace"))
        raise
    finally:
        running.terminate()
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


@contextmanager
def example_pool(directory: Path) -> Iterator[ExamplePool]:
    """`tokenmill up` and `tokenmill gateway`, ready."""
    port, origin = free_port(), f"http://127.0.0.1:{free_port()}"
    env = {
        **clean_environment(),
        "TOKENMILL_POOL_STATE_DIR": str(directory),
        "TOKENMILL_GATEWAY_PORT": str(port),
        "TOKENMILL_GATEWAY_CORS_ORIGINS": origin,
        "MODEL": MODEL,
    }
    mill = [sys.executable, "-m", "tokenmill"]
    up = [*mill, "up", "--model", MODEL, "--engine", f"echo:{STEP_MS}"]
    ready = directory / "ready"
    with process([*up, "--ready-file", str(ready)], env, directory / "up.log") as pool:
        wait_until_sync(lambda: ready.exists() or pool.poll() is not None)
        found = read_connection(directory)
        assert found is not None
        env["TOKENMILL_URL"] = found.url
        with process([*mill, "gateway"], env, directory / "gateway.log"):
            base = f"http://127.0.0.1:{port}"
            wait_until_sync(lambda: answers(f"{base}/readyz"), what="the gateway")
            yield ExamplePool(found.url, base, origin, {**os.environ, **env})
