"""The demo's own pool: `tokenmill up` as a child, its output passed on."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ...shared.errors import TokenmillError
from ..client import Client

START_LIMIT_S = 300.0
"""Covers the one-time conversion of the built-in model on a slow machine."""
STOP_LIMIT_S = 60.0
SETTLE_S = 5.0
"""How long lines may take to come through the pool after what they tell of."""


@asynccontextmanager
async def demo_pool(model: str, show: Callable[[str], None]) -> AsyncIterator[Client]:
    """A pool in a temporary directory, and a client once a worker serves `model`.

    Args:
        model: The model to wait for.
        show: Receives each line that the pool prints.

    Raises:
        TokenmillError: The pool ended, or served nothing in time.
    """
    with tempfile.TemporaryDirectory(prefix="tokenmill-demo-") as directory:
        environment = {**os.environ, "TOKENMILL_POOL_STATE_DIR": directory}
        environment.pop("TOKENMILL_URL", None)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tokenmill", "up"),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the demo, which then stops it
        )
        lines = _Lines(process, show)
        reader = asyncio.create_task(lines.pass_on())
        try:
            async with asyncio.timeout(START_LIMIT_S):
                client = await _first_client(process, environment, model)
                await lines.settle()
            async with client:
                yield client
        except TimeoutError:
            raise TokenmillError(
                f"no worker served '{model}' within {START_LIMIT_S:.0f} s; "
                "the lines above say how far it came"
            ) from None
        finally:
            await _stop(process)
            await reader


async def _first_client(
    process: asyncio.subprocess.Process, environment: dict[str, str], model: str
) -> Client:
    from ...shared.connection import find_pool

    while process.returncode is None:
        if model in await _served(environment):
            return Client(find_pool(None, environment))
        await asyncio.sleep(0.2)
    raise TokenmillError(
        f"`tokenmill up` ended with status {process.returncode}; its lines say why"
    )


async def _served(environment: dict[str, str]) -> set[str]:
    """The models that have a worker now; none while the pool is still starting."""
    from ...shared.connection import find_pool
    from ...shared.errors import RedisUnavailable

    try:
        async with Client(find_pool(None, environment)) as client:
            return {one.name for one in await client.models() if one.num_groups}
    except RedisUnavailable:
        # No connection file yet, or Redis is loading; the pool's own lines say more.
        return set()


class _Lines:
    """The pool's output on its way to the screen.

    Args:
        process: `tokenmill up`.
        show: Receives each line but the hint at the end of the start.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, show: Callable[[str], None]
    ) -> None:
        self._process = process
        self._show = show
        self._pool_ready = asyncio.Event()
        self._worker_ready = asyncio.Event()

    async def pass_on(self) -> None:
        """Shows lines until the pool ends."""
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line.startswith("ready;"):
                self._pool_ready.set()  # what it says to try is what the demo does
                continue
            self._show(line)
            if "| ready:" in line:
                self._worker_ready.set()

    async def settle(self) -> None:
        """Waits until the lines about a start that is over have been shown."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._worker_ready.wait()
                await self._pool_ready.wait()
        except TimeoutError:
            self._show("the pool serves, and has not said so yet; going on")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_LIMIT_S):
            await process.wait()
    except asyncio.CancelledError:
        # A second Ctrl-C: to the pool a second signal means to end at once.
        process.send_signal(signal.SIGTERM)
        await process.wait()
        raise
    except TimeoutError:
        process.kill()
        await process.wait()
        raise TokenmillError(
            f"the pool did not stop within {STOP_LIMIT_S:.0f} s and was killed"
        ) from None
    if process.returncode:
        raise TokenmillError(f"the pool stopped with status {process.returncode}")
