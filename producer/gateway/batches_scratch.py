"""A directory of this gateway's own for what may be lost with it: indexes, copies."""

import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import IO, Final

import structlog

_LOCK: Final = "lock"
_PREFIX: Final = "gateway-"
_log = structlog.get_logger(__name__)


class Scratch:
    """Makes the directory, and removes those of gateways that were killed.

    Args:
        parent: Where gateways of this host have theirs.
    """

    def __init__(self, parent: Path) -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        except OSError as error:
            made = tempfile.mkdtemp(prefix="tokenmill-")
            _log.warning(
                "scratch_elsewhere", wanted=str(parent), why=error.strerror, uses=made
            )
        self.path = Path(made)
        draft = self.path / f".{_LOCK}"
        self._lock: IO[bytes] = draft.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        draft.rename(self.path / _LOCK)  # seen by others once it is held
        for other in parent.glob(f"{_PREFIX}*"):
            if other != self.path and _is_left(other):
                shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Removes the directory."""
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)


def _is_left(directory: Path) -> bool:
    """Whether nobody who lives holds it."""
    try:
        with (directory / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or not locked yet by who has just made it
        return False
    return True
