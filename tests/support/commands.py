"""Commands run as a user runs them, against a pool that a fake group serves."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from .fake_group import FakeGroup

SOURCE = Path(__file__).parents[2] / "src"


class CommandPool:
    """A served pool, and a way to run commands against it."""

    def __init__(self, url: str, group: FakeGroup) -> None:
        self.url = url
        self.group = group

    async def start(self, *args: str, **changes: Any) -> asyncio.subprocess.Process:
        """Starts `tokenmill` with these arguments."""
        environ = {**os.environ, "PYTHONPATH": str(SOURCE), "TOKENMILL_URL": self.url}
        pipe = asyncio.subprocess.PIPE
        streams = {"stdin": pipe, "stdout": pipe, "stderr": pipe} | changes
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tokenmill", *args), env=environ, **streams
        )

    async def run(self, *args: str, given: bytes = b"") -> tuple[int, str, str]:
        """Runs it to its end: exit code, output, errors."""
        process = await self.start(*args)
        out, err = await process.communicate(given)
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    async def newest(self) -> str:
        """The id of the job that was enqueued last, or nothing."""
        members = await self.group.redis.zrevrange(self.group.keys.recent, 0, 0)
        return members[0].decode() if members else ""

    async def state(self, job: str) -> str:
        """The state of a job's record."""
        record = await self.group.scripts.job(job)
        return record["state"] if record else "none"
