"""Output of a batch while it runs: parts in the store, each written whole.

A part is there before the outcomes in it are acknowledged, so nothing is lost with the
gateway that wrote it, and any other can go on: it reads which lines there are. Lines
that two gateways wrote, since one was thought dead, are told by their number.

Small parts are merged, 32 into one, and such again: an item is copied a few times, and
there are never many parts. Everything here runs on the driver's thread.
"""

import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import IO, Final

import msgspec

from ...shared.bulk.messages import Outcome
from ..bulk.flow import Settled
from ..bulk.index import Index, Line
from ..bulk.sink import Form, state_of
from .files_store import CHUNK_BYTES, FilesStore

FAN: Final = 32
"""Parts of a level that become one of the next."""


class PartLine(msgspec.Struct, frozen=True):
    """One line of a part."""

    seq: int
    state: str
    data: bytes
    """A line of the output or of the errors, with its line break."""


class Parts:
    """The parts of one batch.

    Args:
        store: Where files are.
        name: `<tenant>/<batch id>`.
    """

    def __init__(self, store: FilesStore, name: str) -> None:
        self._store = store
        self._name = name
        # Of this attempt alone: parts of an earlier one, of this gateway or of
        # another, must not be written over.
        self._writer = secrets.token_hex(8)
        self._number = 0
        self._mine: dict[int, list[str]] = {}
        """Level -> parts that may be merged."""

    def names(self) -> list[str]:
        """Returns the names of all parts, whoever wrote them."""
        return self._store.parts_now(self._name)

    def read(self, name: str) -> Iterator[PartLine]:
        """Yields the lines of a part."""
        with self._store.opened(name) as file:
            for line in file:
                seq, state, data = line.split(b"\t", 2)
                yield PartLine(int(seq), state.decode(), data)

    def write(self, lines: Iterable[PartLine]) -> None:
        """Writes a part."""
        name = self._next_name(0)
        with self._store.putting(name) as file:
            for line in lines:
                file.write(b"%d\t%s\t%s" % (line.seq, line.state.encode(), line.data))
        self._add(0, name)

    def _add(self, level: int, name: str) -> None:
        waiting = self._mine.setdefault(level, [])
        waiting.append(name)
        if len(waiting) >= FAN:
            merged = self._next_name(level + 1)
            with self._store.putting(merged) as file:
                for part in waiting:
                    self._copy(part, file)
            # From here on lines stand twice, until these are gone.
            for part in waiting:
                self._store.drop(part)
            waiting.clear()
            self._add(level + 1, merged)

    def _copy(self, part: str, file: IO[bytes]) -> None:
        with self._store.opened(part) as source:
            shutil.copyfileobj(source, file, CHUNK_BYTES)

    def _next_name(self, level: int) -> str:
        self._number += 1
        return f"{self._name}/{level}-{self._writer}-{self._number:07d}"


class PartSink:
    """Takes settled items of a batch; BULK's driver calls it.

    Args:
        parts: Where lines go.
        index: Knows which items have theirs; empty at first.
        form: Makes lines.
    """

    def __init__(self, parts: Parts, index: Index, form: Form) -> None:
        self._parts = parts
        self._index = index
        self._form = form
        self._loaded: set[str] = set()
        self._counts: dict[str, int] = {}

    def load(self) -> None:
        """Learns of the lines in parts that are not known yet."""
        for name in self._parts.names():
            if name not in self._loaded:
                self._loaded.add(name)
                for some in _some(self._parts.read(name)):
                    self._note(some)

    def written(self, seqs: Sequence[int]) -> AbstractSet[int]:
        """Returns those of some items that have their line."""
        return self._index.written(seqs)

    def write(self, settled: Sequence[Settled]) -> None:
        """Writes the lines of items that have none."""
        by_seq = {one.seq: one for one in settled}
        known = self._index.written(sorted(by_seq))
        lines = [
            PartLine(seq, state_of(one), self._form(one) + b"\n")
            for seq, one in by_seq.items()
            if seq not in known
        ]
        if lines:
            self._parts.write(lines)
            self._note(lines)

    def drop(self, outcomes: Sequence[Outcome]) -> None:
        """Items cancelled with the run have their line at the end, as all unsettled."""

    def counts(self) -> Mapping[str, int]:
        """Returns the number of lines by state."""
        return dict(self._counts)

    def _note(self, lines: Sequence[PartLine]) -> None:
        by_seq = {line.seq: line for line in lines}
        known = self._index.written(sorted(by_seq))
        new = [line for seq, line in by_seq.items() if seq not in known]
        self._index.record([Line(n.seq, 0, len(n.data), n.state) for n in new])
        for line in new:
            self._counts[line.state] = self._counts.get(line.state, 0) + 1


def _some(lines: Iterator[PartLine]) -> Iterator[list[PartLine]]:
    chunk: list[PartLine] = []
    for line in lines:
        chunk.append(line)
        if len(chunk) == 1000:
            yield chunk
            chunk = []
    yield chunk
