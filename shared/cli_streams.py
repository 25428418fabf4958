"""Standard streams that are closed, full or left by their reader."""

import errno
import io
import os
import sys
from typing import Final

_REFUSALS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
)


def open_streams() -> None:
    """Gives a process that was started with closed streams some that go nowhere."""
    if sys.stdout is None:
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()


def flush_output() -> None:
    """Writes what standard output still holds.

    Raises:
        OSError: It cannot be written.
    """
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def is_output_error(error: OSError) -> bool:
    """Whether this error came from writing standard output."""
    try:
        flush_output()
    except OSError:
        return True  # a buffer that could not be written keeps its bytes
    # Without a buffer nothing is kept; then the kind of error has to do.
    unbuffered = isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase)
    return unbuffered and error.filename is None and error.errno in _REFUSALS


def discard_output() -> None:
    """Lets what is still to be written vanish: the interpreter flushes at exit and
    would complain again.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _nowhere() -> io.TextIOWrapper:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123
