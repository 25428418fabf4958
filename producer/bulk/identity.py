"""What an input is known by, so that a changed one is noticed before it is mixed up."""

from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from ...shared.errors import InvalidRequest, TokenmillError
from .documents import document_files, look_over
from .reading import read_lines

_CHUNK: Final = 1 << 20


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """An input file or directory."""

    size: int
    """Bytes as stored."""
    digest: str
    """BLAKE2b of the bytes as stored; of a directory, with the names of its files."""
    stamp: str
    """Changes with any write: where it is the same, the digest is not taken again."""
    items: int | None = None
    """Lines that are not blank, or documents; None where they cannot be counted."""
    others: int = 0
    """Files of a directory that are passed over."""

    def is_same(self, other: "Identity") -> bool:
        """Whether both have the same contents."""
        return self.size == other.size and self.digest == other.digest


def identify(path: Path, known: Identity | None, *, max_line: int | None) -> Identity:
    """Looks at an input; it is read through only where it may have changed.

    Args:
        path: The file or directory.
        known: What it was known by before.
        max_line: Most bytes of a line; None where the whole file is one document.

    Raises:
        InvalidRequest: It cannot be read.
    """
    try:
        found = look_over(path)
        if known is not None and known.stamp == found.stamp:
            return known
        digest = _digest(path)
    except OSError as error:
        raise InvalidRequest("file", f"{path}: {error.strerror}") from None
    if known is not None and known.digest == digest and known.size == found.size:
        return msgspec.structs.replace(known, stamp=found.stamp)
    items = found.documents if max_line is None else _count(path, max_line)
    return Identity(
        size=found.size,
        digest=digest,
        stamp=found.stamp,
        items=items,
        others=found.others,
    )


def _digest(path: Path) -> str:
    hashed = blake2b(digest_size=16)
    for name, found in document_files(path):
        if path.is_dir():
            hashed.update(f"\0{name}\0".encode())
        try:
            with found.open("rb") as file:
                for chunk in _chunks(file.read):
                    hashed.update(chunk)
        except OSError as error:
            if not path.is_dir():
                raise
            hashed.update(f"{error.errno}".encode())  # its own line says so later
    return hashed.hexdigest()


def _chunks(read: Callable[[int], bytes]) -> Iterator[bytes]:

    while chunk := read(_CHUNK):
        yield chunk


def _count(path: Path, max_line: int) -> int | None:
    try:
        return sum(1 for _ in read_lines(path, max_line))
    except TokenmillError:
        return None  # damaged further on: what comes before is worked off all the same
