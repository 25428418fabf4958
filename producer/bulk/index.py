"""The index of one output, on disk: which lines are written, and where they stand.

With it a file of any length is worked off in constant memory: a second run knows what
is done, ids that come twice are found, and lines are put into input order.
"""

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from ...shared.errors import BulkRunConflict
from .index_faults import told_of

T = TypeVar("T")
FORMAT: Final = 2
"""Of the tables; another one is refused."""
_CACHE_KIB: Final = 8192
"""Pages kept in memory; the rest is the system's to cache."""
_ID_BYTES: Final = 16
"""Of the hash that stands for an id: no two of any file will ever meet."""

RETRIED: Final = ("failed", "cancelled")
"""States of lines whose items may be tried again; one that is wrong stays so."""

_LINE: Final = "(seq INTEGER PRIMARY KEY, offset INTEGER, length INTEGER, state TEXT)"
_TABLES: Final = f"""
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lines {_LINE};
CREATE TABLE IF NOT EXISTS ids (hash BLOB PRIMARY KEY, seq INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS retries (
  seq INTEGER PRIMARY KEY, generation INTEGER, replaces TEXT
);
"""


_RETRY: Final = "INSERT OR REPLACE INTO retries VALUES (?, ?, 'cancelled')"
_RETRY_FAILED: Final = """
INSERT OR REPLACE INTO retries
SELECT lines.seq, coalesce(retries.generation, 0) + 1, lines.state
FROM lines LEFT JOIN retries ON retries.seq = lines.seq WHERE lines.state IN (?, ?)
"""


class Line(msgspec.Struct, frozen=True, array_like=True):
    """One line of the partial file."""

    seq: int
    """The item, numbered in input order."""
    offset: int
    """Its first byte."""
    length: int
    """Bytes, the line break included."""
    state: str
    """As `flow.State`."""


class Index:
    """The tables. One thread at a time may use them.

    Args:
        path: The file; it is made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with told_of(path):
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False
            )
            try:
                self._open(path)
            except BaseException:
                self._db.close()
                raise

    def _open(self, path: Path) -> None:
        # A commit is one sync of the log, and is there after a power cut.
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        self._db.executescript(_TABLES)
        found = self.fact("format", int)
        if found is None:
            self.set_facts(format=FORMAT)
        elif found != FORMAT:
            raise BulkRunConflict(
                f"{path} has format {found} and this version reads {FORMAT}; finish "
                "with the version that began, or --restart"
            )

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def fact(self, name: str, kind: type[T]) -> T | None:
        """Returns a recorded fact, or None.

        Args:
            name: Its name.
            kind: Its type.
        """
        found = self._rows("SELECT value FROM facts WHERE name=?", (name,))
        return msgspec.json.decode(found[0][0], type=kind) if found else None

    def set_facts(self, **facts: object) -> None:
        """Records facts, all or none of them."""
        with self._transaction():
            self._put_facts(**facts)

    def _put_facts(self, **facts: object) -> None:
        rows = [(name, msgspec.json.encode(value)) for name, value in facts.items()]
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)

    def written(self, seqs: Sequence[int]) -> AbstractSet[int]:
        """Returns those of some items whose lines are written.

        Args:
            seqs: Rising.
        """
        if not seqs:
            return frozenset()
        rows = self._rows(
            "SELECT seq FROM lines WHERE seq BETWEEN ? AND ?", (seqs[0], seqs[-1])
        )
        return {seq for (seq,) in rows}.intersection(seqs)

    def claim(self, ids: Sequence[tuple[int, str]]) -> dict[int, int]:
        """Notes whose ids these are, and finds those that came before.

        Args:
            ids: Items and their ids, in input order.

        Returns:
            The item of a repeated id -> the item that had it first.
        """
        rows = [(_hash(text), seq) for seq, text in ids]
        taken: dict[int, int] = {}
        with self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO ids VALUES (?, ?)", rows)
            for hashed, seq in rows:
                (first,) = self._db.execute(
                    "SELECT seq FROM ids WHERE hash=?", (hashed,)
                ).fetchone()
                if first != seq:
                    taken[seq] = first
        return taken

    def generations(self, seqs: Sequence[int]) -> dict[int, int]:
        """Returns the generation of those of some items that were tried before.

        Args:
            seqs: Rising.
        """
        if not seqs:
            return {}
        rows = self._rows(
            "SELECT seq, generation FROM retries WHERE seq BETWEEN ? AND ?",
            (seqs[0], seqs[-1]),
        )
        return dict(rows)

    def replaced(
        self, seqs: Sequence[int]
    ) -> dict[int, Literal["failed", "cancelled"]]:
        """Returns how those of some items settled that were tried before.

        Args:
            seqs: Rising.
        """
        if not seqs:
            return {}
        rows = self._rows(
            "SELECT seq, replaces FROM retries WHERE seq BETWEEN ? AND ?",
            (seqs[0], seqs[-1]),
        )
        return dict(rows)

    def try_again(self, generations: Mapping[int, int]) -> None:
        """Notes items that were cancelled with their run and are to be tried again.

        Args:
            generations: Item -> the generation that comes next.
        """
        with self._transaction():
            self._db.executemany(_RETRY, sorted(generations.items()))

    def record(self, lines: Sequence[Line]) -> None:
        """Notes lines that stand in the partial file and are synced."""
        rows = [msgspec.structs.astuple(line) for line in lines]
        with self._transaction():
            self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?)", rows)

    def end(self) -> int:
        """Returns the length of the partial file as far as it is recorded."""
        # Lines are appended, and rows are not made in the order of their items.
        ((end,),) = self._rows("SELECT max(offset + length) FROM lines")
        return end or 0

    def counts(self) -> dict[str, int]:
        """Returns the number of written lines by state."""
        return dict(self._rows("SELECT state, count(*) FROM lines GROUP BY state"))

    def lines(self, *, ordered: bool) -> Iterator[Line]:
        """Iterates over all lines; nothing may be recorded meanwhile.

        Args:
            ordered: By item, as in the input; else as they stand in the file.
        """
        by = "seq" if ordered else "offset"
        query = f"SELECT seq, offset, length, state FROM lines ORDER BY {by}"  # noqa: S608
        with told_of(self._path):
            for row in self._db.execute(query):
                yield Line(*row)

    def replace_lines(
        self, lines: Iterator[Line], before_commit: Callable[[], None]
    ) -> None:
        """Puts other lines in the place of all; those that failed are tried again.

        Args:
            lines: What is kept, at its new places.
            before_commit: Called once all were taken. After it the partial file is
                `pending`: to be replaced by the one that was made meanwhile.
        """
        with self._transaction():
            self._db.execute("DROP TABLE IF EXISTS remade")
            self._db.execute(f"CREATE TABLE remade {_LINE}")
            rows = (msgspec.structs.astuple(line) for line in lines)
            self._db.executemany("INSERT INTO remade VALUES (?, ?, ?, ?)", rows)
            before_commit()
            self._db.execute(_RETRY_FAILED, RETRIED)
            self._db.execute("DROP TABLE lines")
            self._db.execute("ALTER TABLE remade RENAME TO lines")
            self._put_facts(pending=True, phase="running")

    def _rows(self, query: str, args: Sequence[object] = ()) -> list[Any]:
        with told_of(self._path):
            return self._db.execute(query, args).fetchall()

    def _transaction(self) -> AbstractContextManager[None]:
        return _transaction(self._db, self._path)


@contextmanager
def _transaction(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """All of it or nothing; the driver's own `with` leaves DDL outside."""
    with told_of(path):
        try:
            db.execute("BEGIN IMMEDIATE")
            yield
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # a full disk may have rolled it back by itself
                db.execute("ROLLBACK")
            raise


def _hash(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=_ID_BYTES).digest()
