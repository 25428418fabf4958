"""Gives Numba a writable place for compiled kernels before it is imported by them."""

import os
import tempfile
from pathlib import Path

import structlog


def prepare_cache() -> Path:
    """Points Numba's cache at a directory that this user can write.

    Order: NUMBA_CACHE_DIR if set, then the user's cache directory, then a private
    temporary directory (compiled again at each start; a warning says so).

    Returns:
        The directory in force.
    """
    import numba

    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "tokenmill" / "numba"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        refused = directory
        directory = Path(tempfile.mkdtemp(prefix="tokenmill-numba-"))
        structlog.get_logger("tokenmill.kernels").warning(
            "numba_cache_not_writable",
            directory=str(refused),
            instead=str(directory),
            error=str(error),
        )
    numba.config.CACHE_DIR = str(directory)
    return directory
