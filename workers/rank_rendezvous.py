"""Where the ranks of one group find each other: a file that no name leads to."""

import os
import shutil
import tempfile
from pathlib import Path


class Rendezvous:
    """A file that torch's file store works on.

    On Linux it lies in memory, reached by a descriptor that followers inherit: groups
    of one host cannot meet by mistake, and nothing is left however processes end. The
    descriptor is never closed: torch's store writes to its path once more when it is
    freed, and a number that was given up could lead to any other file by then.
    Elsewhere it is a temporary file, which `close` removes.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._directory: Path | None = None
        if hasattr(os, "memfd_create"):
            # Inherited under the same number, so one path is right for every rank.
            self._descriptor = os.memfd_create("tokenmill-ranks")
            self.path = f"/proc/self/fd/{self._descriptor}"
        else:
            self._directory = Path(tempfile.mkdtemp(prefix="tokenmill-ranks-"))
            self.path = str(self._directory / "store")

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that followers must be started with."""
        return () if self._descriptor is None else (self._descriptor,)

    def close(self) -> None:
        """Removes what has a name."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
