"""Where a bulk command keeps what it writes: the output and what lies beside it.

OUT.jsonl.partial    lines so far, to be followed while the command runs
OUT.jsonl.run/       the index, the lock, what is put together before a rename
OUT.jsonl            appears when all is there
"""

import fcntl
import os
from pathlib import Path
from typing import IO, Final, Self

from ...shared.errors import BulkOutputFailed, BulkRunConflict

PARTIAL: Final = ".partial"
SIDECAR: Final = ".run"


class Place:
    """The paths of one output.

    Args:
        output: What the user named.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.partial = output.with_name(output.name + PARTIAL)
        self.sidecar = output.with_name(output.name + SIDECAR)
        self.index = self.sidecar / "index.sqlite"
        self.assembled = self.sidecar / "assembled"
        """The whole output before it takes its name."""
        self.remade = self.sidecar / "partial"
        """A partial file without the lines that are to be tried again."""
        self.spooled = self.sidecar / "input"
        """What was read from standard input, so that it can be read again."""

    @property
    def is_gzip(self) -> bool:
        """Whether the output is to be compressed."""
        return self.output.suffix == ".gz"

    def make(self) -> None:
        """Makes the sidecar directory.

        Raises:
            BulkOutputFailed: It cannot be made.
        """
        try:
            self.sidecar.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(self.sidecar, error) from None

    def remove_sidecar(self) -> None:
        """Removes what lies beside an output that was never begun; we have the lock."""
        for path in self.sidecar.iterdir():
            path.unlink()
        self.sidecar.rmdir()

    def forget(self) -> None:
        """Removes all but the output and the lock, for a run from the beginning."""
        self.partial.unlink(missing_ok=True)
        for path in self.sidecar.iterdir():
            if path.name != Lock.NAME:
                path.unlink()


class Lock:
    """Keeps a second command from the same output, until it is released or we die.

    Args:
        place: The output.

    Raises:
        BulkRunConflict: Another command has it.
    """

    NAME: Final = "lock"

    def __init__(self, place: Place) -> None:
        path = place.sidecar / self.NAME
        while True:
            try:
                self._file: IO[bytes] = path.open("ab")
            except OSError as error:
                raise unwritable(path, error) from None
            self._take(place)
            if self._is_there(path):
                return
            self._file.close()  # whoever had it has removed it: there is a new one
            place.make()

    def _take(self, place: Place) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise BulkRunConflict(
                f"another command is writing {place.output}; wait for its end, or "
                "name another output"
            ) from None

    def _is_there(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def unwritable(path: Path, error: OSError) -> BulkOutputFailed:
    """Returns the error for a file of the output that the system refuses."""
    return BulkOutputFailed(
        f"{path} cannot be written: {error.strerror or error}; what was recorded "
        "stays, so run the same command again once that is mended"
    )


def sync_directory(directory: Path) -> None:
    """Makes names in a directory survive a crash of the machine."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
