"""One pool per state directory: an advisory lock that dies with its holder."""

import os
import sys
import time
from pathlib import Path
from typing import Final

from ..connection import LOCK_NAME, read_connection
from ..errors import ConfigError

if sys.platform != "win32":
    import fcntl

REDIS_LOCK_NAME: Final = "redis.lock"
"""Inherited by the embedded server, so that it is held until that has ended too."""
_POLL_S: Final = 0.05


class StateLock:
    """A locked file in the state directory.

    Args:
        directory: The state directory.
        name: The file's name.
    """

    def __init__(self, directory: Path, name: str = LOCK_NAME) -> None:
        self._directory = directory
        self._path = directory / name
        self._handle: int | None = None

    @property
    def handle(self) -> int:
        """The open file, for a child that is to hold the lock as well."""
        assert self._handle is not None
        return self._handle

    def acquire(self, wait_s: float = 0.0) -> None:
        """Takes the lock.

        Args:
            wait_s: How long a holder that is just ending is waited for.

        Raises:
            ConfigError: Another pool has this state directory.
        """
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(handle, False)
        end = time.monotonic() + wait_s
        while not _try_lock(handle):
            if time.monotonic() >= end:
                os.close(handle)
                raise ConfigError("pool.state_dir", self._held())
            time.sleep(_POLL_S)
        self._handle = handle

    def release(self) -> None:
        """Gives the lock back; harmless when it is not held."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _held(self) -> str:
        connection = read_connection(self._directory)
        who = f" (process {connection.pid})" if connection is not None else ""
        return (
            f"a pool already runs with state directory {self._directory}{who}; use "
            "that one, stop it first, or give another directory with --state-dir"
        )


def _try_lock(handle: int) -> bool:
    if sys.platform != "win32":  # which has no flock, and no embedded server
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
