"""Items of a JSONL file: every line is one, or an error that names its line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from ...shared.bulk.messages import Document, Item
from ...shared.errors import InvalidRequest, PayloadTooLarge, TokenmillError
from ...shared.messages import JobError, Prompt
from .flow import Entry, Fed, Refused
from .index import Index
from .reading import RawLine, Watch, read_lines

PART: Final = 200
"""Lines looked up in the index at once."""


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a line, as far as it could be read."""

    label: str = "text"
    """How its output line is written; the reader's and the sink's own words."""
    custom_id: str | None = None
    id_field: str = "id"
    """How the id is called in the line."""
    content: Prompt | Document | None = None
    error: InvalidRequest | None = None
    """Why there is no content."""


class LineReader(Protocol):
    """Makes something to run of a line."""

    @property
    def max_bytes(self) -> int:
        """Of a line."""

    def read(self, data: bytes) -> Parsed:
        """Reads a line; what is wrong with it is part of what is returned."""


class LineSource:
    """The lines of a file that have no output line yet.

    Args:
        path: JSONL, plain or gzip.
        index: Of the output.
        reader: Makes something to run of a line.
        total: Lines that are not blank, where they were counted.
        watch: Sees how far a reading is, and may stop it.
        called: What errors call the file; None: its path.
    """

    def __init__(
        self,
        path: Path,
        index: Index,
        reader: LineReader,
        total: int | None = None,
        *,
        watch: Watch | None = None,
        called: str | None = None,
    ) -> None:
        self._path = path
        self._index = index
        self._reader = reader
        self.total = total
        self._watch = watch
        self._called = called

    def entries(self) -> Iterator[Entry]:
        """Yields what is left to do, in input order."""
        lines = read_lines(
            self._path,
            self._reader.max_bytes,
            watch=self._watch,
            called=self._called,
        )
        for part in _parts(lines):
            yield from self._part(part)

    def _part(self, lines: list[RawLine]) -> Iterator[Entry]:
        seqs = [line.number - 1 for line in lines]
        written = self._index.written(seqs)
        tried = self._index.generations(seqs)
        replaced = self._index.replaced(seqs)
        left = [line for line in lines if line.number - 1 not in written]
        parsed = {line.number - 1: self._parse(line) for line in left}
        ids = [(s, p.custom_id) for s, p in parsed.items() if p.custom_id is not None]
        repeated = self._index.claim(ids) if ids else {}
        for line in left:
            seq = line.number - 1
            found = _unless_repeated(parsed[seq], repeated.get(seq))
            yield _entry(line, found, tried.get(seq, 0), replaced.get(seq))

    def _parse(self, line: RawLine) -> Parsed:
        if line.data:
            return self._reader.read(line.data)
        most = self._reader.max_bytes
        problem = f"has {line.length} bytes; expected at most {most}"
        return Parsed(error=PayloadTooLarge("line", problem))


def _parts(lines: Iterator[RawLine]) -> Iterator[list[RawLine]]:
    """A few lines at a time; where the file breaks, what came before is among them."""
    part: list[RawLine] = []
    broken: TokenmillError | None = None
    try:
        for line in lines:
            part.append(line)
            if len(part) == PART:
                yield part
                part = []
    except TokenmillError as error:
        broken = error
    if part:
        yield part
    if broken is not None:
        raise broken


def _unless_repeated(parsed: Parsed, first: int | None) -> Parsed:
    """The line itself, or what is wrong with it since its id came before."""
    if first is None or parsed.error is not None:
        return parsed
    error = InvalidRequest(
        parsed.id_field,
        f"'{parsed.custom_id}' is that of line {first + 1} as well; expected another "
        "for each line",
    )
    return msgspec.structs.replace(parsed, error=error)


def _entry(
    line: RawLine,
    parsed: Parsed,
    generation: int,
    replaces: Literal["failed", "cancelled"] | None,
) -> Entry:
    seq = line.number - 1
    if parsed.error is not None:
        return Refused(
            seq=seq,
            error=job_error(parsed.error),
            custom_id=parsed.custom_id,
            label=parsed.label,
            line=line.number,
        )
    content = parsed.content
    item = Item(
        seq=seq,
        generation=generation,
        replaces=replaces,
        custom_id=parsed.custom_id or "",
        prompt=content if isinstance(content, Prompt) else None,
        document=content if isinstance(content, Document) else None,
    )
    return Fed(item=item, label=parsed.label, line=line.number, size=len(line.data))


def job_error(error: InvalidRequest) -> JobError:
    """Returns what is recorded of something wrong in the input."""
    return JobError(error.code, str(error), error.field)
