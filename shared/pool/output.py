"""Where children write: standard output is passed on line by line; standard error,
which has the logs, goes to files, or is passed on as well when a person watches.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

_ROTATE_BYTES: Final = 16 * 1024 * 1024
"""A log larger than this at a start is set aside, replacing the one before."""
_LAST_LINES: Final = 5
_DRAIN_S: Final = 1.0
"""How long the last lines of a child that has ended are waited for."""


class Sink:
    """One incarnation's output.

    Args:
        stdout: Handle for the child's standard output.
        stderr: Handle for its standard error.
        pump: Passes lines on.
    """

    def __init__(self, stdout: int, stderr: int, pump: "asyncio.Task[None]") -> None:
        self.stdout = stdout
        self.stderr = stderr
        self._pump = pump

    def started(self) -> None:
        """The child has its copies of the handles; ours are closed."""
        for handle in {self.stdout, self.stderr}:
            os.close(handle)

    async def close(self) -> None:
        """Waits until what the child wrote has been passed on."""
        await asyncio.wait([self._pump], timeout=_DRAIN_S)
        self._pump.cancel()


class Output:
    """Output of all children of a pool.

    Args:
        directory: Where log files are.
        show: Receives a child's name and a line of it.
        logs_too: Pass logs on as well and write no files.
    """

    def __init__(
        self, directory: Path, show: Callable[[str, str], None], *, logs_too: bool
    ) -> None:
        self._directory = directory
        self._show = show
        self._logs_too = logs_too
        self._last: dict[str, deque[str]] = {}

    def open(self, name: str) -> Sink:
        """Returns a fresh sink for the next incarnation of a child."""
        reading, writing = os.pipe()
        pump = asyncio.create_task(self._pass_on(name, reading))
        if self._logs_too:
            return Sink(writing, writing, pump)
        return Sink(writing, self._log_file(name), pump)

    def _log_file(self, name: str) -> int:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists() and path.stat().st_size > _ROTATE_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def path(self, name: str) -> Path:
        """The log file of a child."""
        return self._directory / f"{name}.log"

    def tail(self, name: str, num_lines: int = _LAST_LINES) -> list[str]:
        """Returns the last lines of a child's log, to be shown when it failed."""
        path = self.path(name)
        if self._logs_too or not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            text = file.read().decode(errors="replace")
        return text.splitlines()[-num_lines:]

    def last_words(self, name: str) -> list[str]:
        """The same, also where a person has read them already."""
        return list(self._last.get(name, ())) or self.tail(name)

    async def _pass_on(self, name: str, handle: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(handle, "rb")
        )
        try:
            while True:
                try:
                    raw = await reader.readline()
                except ValueError:
                    self._show(name, "(a line too long to show)")
                    continue
                if not raw:
                    return
                text = raw.decode(errors="replace").rstrip()
                if text:
                    self._show(name, text)
                if text and self._logs_too:
                    words = self._last.setdefault(name, deque(maxlen=_LAST_LINES))
                    words.append(text)
        finally:
            transport.close()
