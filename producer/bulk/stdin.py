"""Standard input as a file, so that it can be read again after a crash."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

from .place import Place, unwritable

_CHUNK: Final = 1 << 20


async def spool_stdin(place: Place) -> Path:
    """Copies standard input to its end, and can be cancelled meanwhile.

    Args:
        place: The output beside which it is kept.

    Returns:
        The copy, which is to take the place of one that was kept before.

    Raises:
        BulkOutputFailed: It cannot be kept, as on a full disk.
    """
    number = sys.stdin.fileno()
    path = place.spooling
    try:
        with path.open("wb") as file:
            while chunk := await _read(number):
                file.write(chunk)
    except OSError as error:
        raise unwritable(path, error) from None
    return path


async def _read(number: int) -> bytes:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(number, ready.set)
    except PermissionError:  # a regular file, which is always ready
        return os.read(number, _CHUNK)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(number)
    return os.read(number, _CHUNK)
