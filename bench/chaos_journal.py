"""What client processes write down, so that a killed one goes on where it was."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Journal:
    """A file of JSON lines; a line is written by one call, whole or not at all.

    Args:
        path: Made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, **line: object) -> None:
        """Appends a line; it survives this process from here on."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if os.write(self._fd, data) != len(data):
            raise OSError("the journal's disk is full")


class Tail:
    """Reads what others append to a journal.

    Args:
        path: May not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[Line]:
        """Returns the lines since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return [json.loads(line) for line in data[:whole].splitlines()]


def lines(path: Path) -> Iterator[Line]:
    """All lines of a journal."""
    yield from Tail(path).new_lines()
