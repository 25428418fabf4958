"""What an input is known by, so that a changed one is noticed before it is mixed up."""

import os
import stat
from hashlib import blake2b
from pathlib import Path

import msgspec

from ...shared.errors import InputUnreadable, InvalidRequest
from .documents import Files, document_files, look_over
from .off_loop import Check, go_on
from .reading import chunks, read_lines


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


def identify(
    path: Path,
    known: Identity | None,
    *,
    max_line: int | None,
    check: Check = go_on,
) -> Identity:
    """Looks at an input; it is read through only where it may have changed.

    Args:
        path: The file or directory.
        known: What it was known by before.
        max_line: Most bytes of a line; None where the whole file is one document.
        check: Called now and then; may raise to stop.

    Raises:
        InvalidRequest: It cannot be read, or not twice.
    """
    try:
        _check_kind(path)
        found = look_over(path)
        if known is not None and known.stamp == found.stamp:
            return _noted(known, found)
        digest = _digest(path, check)
    except OSError as error:
        raise InvalidRequest("file", f"{path}: {error.strerror}") from None
    if known is not None and known.digest == digest and known.size == found.size:
        return _noted(known, found)
    items = found.documents if max_line is None else _count(path, max_line, check)
    return Identity(
        size=found.size,
        digest=digest,
        stamp=found.stamp,
        items=items,
        others=found.others,
    )


def _noted(known: Identity, found: Files) -> Identity:
    """The same contents, as they lie there now."""
    if (known.stamp, known.others) == (found.stamp, found.others):
        return known
    return msgspec.structs.replace(known, stamp=found.stamp, others=found.others)


def _check_kind(path: Path) -> None:
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InvalidRequest(
            "file",
            f"{path} is neither a file nor a directory, so it cannot be read again; "
            "give a pipe to standard input, which is -",
        )


def _digest(path: Path, check: Check) -> str:
    hashed = blake2b(digest_size=16)
    for name, found in document_files(path):
        if path.is_dir():
            hashed.update(os.fsencode(f"\0{name}\0"))
        try:
            with found.open("rb") as file:
                for chunk in chunks(file):
                    check()
                    hashed.update(chunk)
        except OSError as error:
            if not path.is_dir():
                raise
            hashed.update(f"{error.errno}".encode())  # its own line says so later
    return hashed.hexdigest()


def _count(path: Path, max_line: int, check: Check) -> int | None:
    try:
        return sum(1 for _ in read_lines(path, max_line, watch=lambda *_: check()))
    except InputUnreadable:
        return None  # damaged further on: what comes before is worked off all the same
