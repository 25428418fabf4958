"""Lines of a file of any length: plain or gzip, bounded, numbered."""

import codecs
import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, cast

import msgspec

from ...shared.errors import InputUnreadable, InvalidRequest

GZIP_MAGIC: Final = b"\x1f\x8b"
GZIP_SUFFIX: Final = ".gz"
_BOM: Final = b"\xef\xbb\xbf"
_CHUNK: Final = 1 << 20
WATCH_LINES: Final = 4096
_WATCH_BYTES: Final = 4 * 1024 * 1024

Watch = Callable[[int, int], None]
"""Told every few lines how many were read, blank ones too, and their bytes unpacked.
It may raise to stop the reading."""


class RawLine(msgspec.Struct, frozen=True):
    """One line as it stands in the file."""

    number: int
    """From 1."""
    data: bytes
    """Without its line break; empty where the line is too long."""
    length: int
    """Bytes that it has."""


@contextmanager
def open_input(path: Path, called: str | None = None) -> Iterator[IO[bytes]]:
    """Opens a file, unpacked where its first bytes say gzip, whatever its name.

    Args:
        path: The file.
        called: What errors call it; None: its path.

    Raises:
        InvalidRequest: It cannot be opened.
    """
    try:
        raw = path.open("rb")
    except OSError as error:
        raise InvalidRequest("file", f"{called or path}: {error.strerror}") from None
    with raw:
        if raw.peek(2)[:2] == GZIP_MAGIC:
            with gzip.GzipFile(fileobj=raw, mode="rb") as packed:
                yield cast("IO[bytes]", packed)
        else:
            yield raw


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yields what is left of a file, in pieces of a megabyte."""
    while chunk := file.read(_CHUNK):
        yield chunk


class _Watched:
    """Counts what is read of a file, and tells it now and then."""

    def __init__(self, file: IO[bytes], watch: Watch | None) -> None:
        self._file = file
        self._watch = watch
        self._lines = 0
        self._bytes = 0
        self._told = (0, 0)

    def readline(self, size: int) -> bytes:
        line = self._file.readline(size)
        self._lines += bool(line)
        self._bytes += len(line)
        lines, told = self._told
        is_due = self._lines - lines >= WATCH_LINES
        if is_due or self._bytes - told >= _WATCH_BYTES or not line:
            self._told = (self._lines, self._bytes)
            if self._watch is not None:
                self._watch(self._lines, self._bytes)
        return line


def read_lines(
    path: Path,
    max_bytes: int,
    *,
    watch: Watch | None = None,
    called: str | None = None,
) -> Iterator[RawLine]:
    """Yields the lines of a file that are not blank.

    Args:
        path: The file, plain or gzip.
        max_bytes: Of a line; one that is longer is passed over without being held.
        watch: Sees how far it is while it reads, and may stop it.
        called: What errors call the file; None: its path.

    Raises:
        InputUnreadable: The file ends or breaks in mid-stream, as damaged gzip does.
        InvalidRequest: It cannot be opened, or is in UTF-16.
    """
    with open_input(path, called) as opened:
        file = _Watched(opened, watch)
        number = 0
        try:
            while True:
                line = file.readline(max_bytes + 1)
                if not line:
                    return
                number += 1
                if number == 1:
                    _check_encoding(line, called or str(path))
                    line = line.removeprefix(_BOM)
                length = len(line)
                if not line.endswith(b"\n") and length > max_bytes:
                    length += _skip_line(file, max_bytes)
                    yield RawLine(number, b"", length)
                elif data := line.strip():
                    yield RawLine(number, data, length)
        except (OSError, EOFError, zlib.error) as error:
            raise InputUnreadable(
                "file",
                f"{called or path} cannot be read beyond line {number}: {error}",
            ) from None


def _check_encoding(start: bytes, called: str) -> None:
    """One word on the whole file instead of an error for each of its lines."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidRequest(
            "file",
            f"{called} is in UTF-16, as its first bytes say; expected UTF-8: convert "
            "it with iconv -f UTF-16 -t UTF-8",
        )


def _skip_line(file: _Watched, step: int) -> int:
    skipped = 0
    while part := file.readline(step):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped
