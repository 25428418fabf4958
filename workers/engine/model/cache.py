"""Where converted models live on disk, and how one is made exactly once."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ....shared.errors import ModelLoadError

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done, 0 to 1."""

LOCK_TIMEOUT_S = 600.0
"""A conversion takes seconds; a holder that needs longer than this is stuck."""


def cache_directory() -> Path:
    """Returns the directory for converted models (XDG; may not exist yet)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "tokenmill" / "models"


def build_once(
    directory: Path,
    build: Callable[[Path, Progress], None],
    progress: Progress,
) -> Path:
    """Builds `directory` unless it is there, once across processes.

    The build writes into a temporary neighbour which is renamed at the end, so a
    directory that exists is complete; a killed build leaves nothing that counts.

    Args:
        directory: The final place.
        build: Fills the directory it is given.
        progress: Told about waiting and handed on to `build`.

    Returns:
        `directory`.

    Raises:
        ModelLoadError: The cache cannot be written, or another process holds the
            lock for too long.
    """
    if directory.is_dir():
        return directory
    from filelock import FileLock, Timeout

    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory.with_name(directory.name + ".lock"))
        with lock.acquire(timeout=LOCK_TIMEOUT_S):
            if not directory.is_dir():
                _build_beside(directory, build, progress)
    except Timeout as error:
        raise ModelLoadError(
            f"another process has held {lock.lock_file} for {LOCK_TIMEOUT_S:.0f} s; "
            "end it, or remove the file if no such process exists"
        ) from error
    except OSError as error:
        raise ModelLoadError(
            f"the model cache {directory.parent} cannot be written: {error}; free "
            "space there, or set XDG_CACHE_HOME to a directory that can be written"
        ) from error
    return directory


def _build_beside(
    directory: Path, build: Callable[[Path, Progress], None], progress: Progress
) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        build(partial, progress)
        partial.chmod(0o755)  # made private by mkdtemp; a cache may be shared
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
