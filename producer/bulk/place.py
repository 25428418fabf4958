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
        self.partial = output.parent / (output.name + PARTIAL)
        self.sidecar = output.parent / (output.name + SIDECAR)
        self._made = False
        self.index = self.sidecar / "index.sqlite"
        self.assembled = self.sidecar / "assembled"
        """The whole output before it takes its name."""
        self.remade = self.sidecar / "partial"
        """A partial file without the lines that are to be tried again."""
        self.spooled = self.sidecar / "input"
        """What was read from standard input, so that it can be read again."""
        self.spooling = self.sidecar / "input.new"
        """The same, before all of it was read."""

    @property
    def is_gzip(self) -> bool:
        """Whether the output is to be compressed."""
        return self.output.suffix == ".gz"

    def make(self) -> None:
        """Makes the sidecar directory, or finds ours there.

        Raises:
            BulkRunConflict: There is one with files of somebody else's.
            BulkOutputFailed: It cannot be made.
        """
        try:
            self.sidecar.mkdir()
            self._made = True
        except FileExistsError:
            self._check_ours()
        except OSError as error:
            raise unwritable(self.sidecar, error) from None

    def _check_ours(self) -> None:
        """Our index may have company; without it, only our own files may be there."""
        try:
            names = {path.name for path in self.sidecar.iterdir()}
        except OSError as error:
            raise unwritable(self.sidecar, error) from None
        strange = names - self._own
        if strange and self.index.name not in names:
            raise BulkRunConflict(
                f"{self.sidecar} is to have our index, and holds files of another "
                f"origin ('{min(strange)[:80]}'); move it away, or name another output"
            )
        self._made = self._made or self.index.name in names

    @property
    def _own(self) -> frozenset[str]:
        """Names of whatever we put into the sidecar directory."""
        index = self.index.name
        return frozenset(
            (
                *(Lock.NAME, index, f"{index}-wal", f"{index}-shm", f"{index}-journal"),
                *(self.assembled.name, self.remade.name),
                *(self.spooled.name, self.spooling.name),
            )
        )

    def remove_sidecar(self) -> None:
        """Removes what lies beside an output that was never begun; we have the lock.

        What is not ours stays, and then so does the directory.
        """
        for name in self._own:
            (self.sidecar / name).unlink(missing_ok=True)
        if self._made and not any(self.sidecar.iterdir()):
            self.sidecar.rmdir()

    def forget(self) -> None:
        """Removes all of ours but the output and the lock, to begin again.

        Raises:
            BulkOutputFailed: The system refuses it.
        """
        try:
            self.partial.unlink(missing_ok=True)
            for name in self._own - {Lock.NAME}:
                (self.sidecar / name).unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self.partial, error) from None


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
