"""Lines of a file of any length: plain or gzip, bounded, numbered."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, cast

import msgspec

from ...shared.errors import InputUnreadable, InvalidRequest

GZIP_MAGIC: Final = b"\x1f\x8b"
GZIP_SUFFIX: Final = ".gz"
_BOM: Final = b"\xef\xbb\xbf"


class RawLine(msgspec.Struct, frozen=True):
    """One line as it stands in the file."""

    number: int
    """From 1."""
    data: bytes
    """Without its line break; empty where the line is too long."""
    length: int
    """Bytes that it has."""


@contextmanager
def open_input(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file, unpacked where its first bytes say gzip, whatever its name.

    Args:
        path: The file.

    Raises:
        InvalidRequest: It cannot be opened.
    """
    try:
        raw = path.open("rb")
    except OSError as error:
        raise InvalidRequest("file", f"{path}: {error.strerror}") from None
    with raw:
        if raw.peek(2)[:2] == GZIP_MAGIC:
            with gzip.GzipFile(fileobj=raw, mode="rb") as packed:
                yield cast("IO[bytes]", packed)
        else:
            yield raw


def read_lines(path: Path, max_bytes: int) -> Iterator[RawLine]:
    """Yields the lines of a file that are not blank.

    Args:
        path: The file, plain or gzip.
        max_bytes: Of a line; one that is longer is passed over without being held.

    Raises:
        InputUnreadable: The file ends or breaks in mid-stream, as damaged gzip does.
        InvalidRequest: It cannot be opened.
    """
    with open_input(path) as file:
        number = 0
        try:
            while True:
                line = file.readline(max_bytes + 1)
                if not line:
                    return
                number += 1
                if number == 1:
                    line = line.removeprefix(_BOM)
                length = len(line)
                if not line.endswith(b"\n") and length > max_bytes:
                    length += _skip_line(file, max_bytes)
                    yield RawLine(number, b"", length)
                elif data := line.strip():
                    yield RawLine(number, data, length)
        except (OSError, EOFError, zlib.error) as error:
            raise InputUnreadable(
                "file", f"{path} cannot be read beyond line {number}: {error}"
            ) from None


def _skip_line(file: IO[bytes], step: int) -> int:
    skipped = 0
    while part := file.readline(step):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped
