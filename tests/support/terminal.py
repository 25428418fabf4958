"""A command on a terminal of a given size, as a person has it before them."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .pools import clean_environment

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]|\x1b[=>]")


class Terminal:
    """The master's side of a terminal that a command runs on."""

    def __init__(self, master: int, process: "subprocess.Popen[bytes]") -> None:
        self.raw = ""
        self.process = process
        self._master = master

    @property
    def text(self) -> str:
        """All that was ever written, without what moves the cursor or sets colours."""
        return _ESCAPES.sub("", self.raw)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed, as a shell leaves it."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def read_until(self, wanted: str, timeout_s: float = 60) -> None:
        """Reads on until `wanted` was written since the last call."""
        seen, end = len(self.text), time.monotonic() + timeout_s
        while wanted not in self.text[seen:]:
            assert time.monotonic() < end, f"no {wanted!r} in\n{self.text[seen:]}"
            self._read(0.1)

    def wait(self, timeout_s: float = 60) -> int:
        end = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < end, "the command does not end"
            self._read(0.05)
        while self._read(0.0):
            pass
        return self.process.returncode

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)


@contextmanager
def terminal(
    *arguments: str, columns: int = 120, lines: int = 40, **environment: str
) -> Iterator[Terminal]:
    """Runs `tokenmill` with these arguments on a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    base = {k: v for k, v in clean_environment().items() if k not in _SIZES}
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenmill", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**base, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
        start_new_session=True,
    )
    made = Terminal(master, process)
    try:
        yield made
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(slave)
        os.close(master)


_SIZES = frozenset(("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"))
