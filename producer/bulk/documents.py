"""Documents to be summarized: lines of a JSONL file, or files of a directory."""

import os
import stat
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal

import msgspec

from ...shared.bulk.messages import Document, Item
from ...shared.errors import InvalidRequest, PayloadTooLarge
from ...shared.typed import parse, shown
from .flow import Entry, Fed, Refused
from .index import Index
from .line_source import PART, Parsed, job_error
from .markup import READERS, read_markup
from .reading import GZIP_SUFFIX, open_input
from .requests import ENVELOPE_BYTES, read_id

MAX_BYTES: Final = 16 * 1024 * 1024
"""Of one document: a thousand pages are three."""
JSONL_SUFFIXES: Final = (".jsonl", ".ndjson")


class DocumentReader:
    """Reads documents from lines of JSON: `id`, `text`, and a `title` if there is one.

    Other fields are left alone.
    """

    # Escapes make a text up to six times as long as JSON.
    max_bytes = 6 * MAX_BYTES + ENVELOPE_BYTES

    def read(self, data: bytes) -> Parsed:
        """Reads a line; what is wrong with it is part of what is returned."""
        label, custom_id = "text", None
        try:
            plain = parse(data, "line")
            if not isinstance(plain, dict):
                raise InvalidRequest(
                    "line", f"expected an object, found {shown(plain)}"
                )
            label, custom_id = read_id(plain.get("id"))
            text, title = plain.get("text"), plain.get("title")
            if not isinstance(text, str):
                raise _expected_text("text", text)
            if title is not None and not isinstance(title, str):
                raise _expected_text("title", title)
            document = checked(Document(text, title or ""))
        except InvalidRequest as error:
            return Parsed(label=label, custom_id=custom_id, error=error)
        return Parsed(label=label, custom_id=custom_id, content=document)


def _expected_text(field: str, value: object) -> InvalidRequest:
    if value is None:
        return InvalidRequest(field, "is missing; expected a text")
    return InvalidRequest(field, f"expected a text, found {shown(value)}")


def checked(document: Document) -> Document:
    """Returns a document that can be summarized.

    Raises:
        InvalidRequest: It is empty, too long, or no Unicode text.
    """
    if not document.text.strip():
        raise InvalidRequest("text", "is empty; expected something to summarize")
    for field, text in (("text", document.text), ("title", document.title)):
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                field,
                f"character {error.start} is half of a surrogate pair, which has no "
                "UTF-8 form; decode the source with its right encoding",
            ) from None
        if size > MAX_BYTES:
            raise _too_large(field, size)
    return document


def _too_large(field: str, size: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        field, f"has {size} bytes; expected at most {MAX_BYTES}; divide the document"
    )


class FileSource:
    """Files as documents: one that is named, or those of a directory and below.

    Args:
        path: The file or directory.
        index: Of the output.
        total: Number of files, where they were counted.
    """

    def __init__(self, path: Path, index: Index, total: int | None = None) -> None:
        self._path = path
        self._index = index
        self.total = total

    def entries(self) -> Iterator[Entry]:
        """Yields what is left to do, in the order of the paths."""
        part: list[tuple[int, str, Path]] = []
        for seq, (name, path) in enumerate(document_files(self._path)):
            part.append((seq, name, path))
            if len(part) == PART:
                yield from self._part(part)
                part = []
        yield from self._part(part)

    def _part(self, files: list[tuple[int, str, Path]]) -> Iterator[Entry]:
        seqs = [seq for seq, _, _ in files]
        written = self._index.written(seqs)
        tried = self._index.generations(seqs)
        replaced = self._index.replaced(seqs)
        for seq, name, path in files:
            if seq not in written:
                yield _entry(seq, name, path, tried.get(seq, 0), replaced.get(seq))


def _entry(
    seq: int,
    name: str,
    path: Path,
    generation: int,
    replaces: Literal["failed", "cancelled"] | None,
) -> Entry:
    name = _id(name)
    try:
        document = checked(read_file(path))
    except InvalidRequest as error:
        return Refused(seq=seq, error=job_error(error), custom_id=name)
    item = Item(
        seq=seq,
        generation=generation,
        replaces=replaces,
        custom_id=name,
        document=document,
    )
    return Fed(item=item, size=len(document.text.encode()))


def _id(name: str) -> str:
    r"""Returns the path of a document as its id, another for each path.

    A path need not be UTF-8: a byte that is not is written as `\xff`, and a backslash
    as two, so that the path can be had back.
    """
    return os.fsencode(name.replace("\\", "\\\\")).decode(errors="backslashreplace")


def read_file(path: Path) -> Document:
    """Reads one file as its kind says: text, Markdown or HTML, plain or gzip.

    Raises:
        InvalidRequest: It cannot be read, is too large or of another encoding.
    """
    try:
        with open_input(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidRequest("file", f"cannot be read: {error}") from None
    if len(raw) > MAX_BYTES:
        raise _too_large("file", len(raw))
    return read_markup(raw, suffix_of(path))


def suffix_of(path: Path) -> str:
    """Returns what kind of file it is by its name, `.gz` left aside."""
    name = path.name.lower().removesuffix(GZIP_SUFFIX)
    return Path(name).suffix


def is_document_name(name: str) -> bool:
    """Whether a file of this name is read as a document where its directory is."""
    return not name.startswith(".") and suffix_of(Path(name)) in READERS


def is_lines(path: Path) -> bool:
    """Whether a file holds a document in each line."""
    return suffix_of(path) in JSONL_SUFFIXES


def document_files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yields ids and paths of documents, in the order of the paths.

    Args:
        path: A file, which is taken whatever its name, or a directory. In it hidden
            files, links to directories and other kinds of files, as pipes and devices,
            are passed over. The files of a directory come before those of the
            directories in it.
    """
    if not path.is_dir():
        yield path.name, path
        return
    for directory, below, names in os.walk(path):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            found = Path(directory, name)
            if is_document_name(name) and _may_be_read(found):
                yield found.relative_to(path).as_posix(), found


def _may_be_read(path: Path) -> bool:
    """Opening a pipe waits for who writes to it; a dead link gets its own error."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return True


class Files(msgspec.Struct, frozen=True):
    """What a directory holds."""

    documents: int
    others: int
    """Files of other kinds, which are passed over."""
    size: int
    """Bytes of the documents."""
    stamp: str
    """Of names, sizes, times of modification and of change, and inodes."""


def look_over(path: Path) -> Files:
    """Counts what a directory holds, without reading files."""
    hashed = blake2b(digest_size=16)
    documents = size = 0
    for name, found in document_files(path):
        documents += 1
        try:
            status = found.stat()
        except OSError as error:
            if not path.is_dir():
                raise
            hashed.update(_bytes(f"{name}\0{error.errno}\0"))  # its own line says so
            continue
        size += status.st_size
        hashed.update(_bytes(f"{name}\0{_stamp(status)}\0"))
    others = 0
    if path.is_dir():
        num_files = sum(len(names) for _, _, names in os.walk(path))
        others = num_files - documents
    return Files(documents, others, size, hashed.hexdigest())


def _stamp(status: os.stat_result) -> str:
    """Changes with any write: the time of change cannot be set back, as `touch -r` and
    `cp -p` do with that of modification, and another file moved here has another inode.
    """
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def _bytes(text: str) -> bytes:
    """Names need not be UTF-8."""
    return os.fsencode(text)
