"""The file that lines are appended to: synced, indexed, each line once.

The index is the truth of what is written. A line counts once it is synced and the index
says so; what stands behind the last line that counts, torn or whole, is cut off when
the file is opened again, since its outcome is still in Redis.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import IO, Final, Protocol

from ...shared.bulk.messages import Outcome
from ...shared.errors import (
    BulkRunConflict,
    InputUnreadable,
    InvalidRequest,
    kind_of,
)
from .flow import Done, Settled, State
from .index import Index, Line
from .place import Place, sync_directory, unwritable

_log: Final = logging.getLogger("tokenmill.producer")


class Form(Protocol):
    """How a settled item looks as a line of the output."""

    def __call__(self, settled: Settled) -> bytes:
        """Returns one JSON object, without a line break."""


class FileSink:
    """Appends to the partial file of an output.

    Args:
        place: The output.
        index: Its index.
        form: Makes lines.
        copy: Is given every line that now counts, as for standard output.

    Raises:
        BulkRunConflict: The partial file is shorter than the index says.
        BulkOutputFailed: It cannot be opened.
    """

    def __init__(
        self,
        place: Place,
        index: Index,
        form: Form,
        copy: Callable[[bytes], None] | None = None,
    ) -> None:
        self._place = place
        self._index = index
        self._form = form
        self._copy = copy
        self._counts = index.counts()
        self._end = index.end()
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        path = self._place.partial
        try:
            file = path.open("ab")
            sync_directory(path.parent)
            size = file.seek(0, os.SEEK_END)
            if size < self._end:
                file.close()
                raise BulkRunConflict(
                    f"{path} has {size} bytes and its index knows of {self._end}: it "
                    "was changed or replaced; put it back, or begin again with "
                    "--restart"
                )
            if size > self._end:
                _log.info("%s: cut %d torn bytes", path, size - self._end)
                file.truncate(self._end)
        except OSError as error:
            raise unwritable(path, error) from None
        return file

    def written(self, seqs: Sequence[int]) -> AbstractSet[int]:
        """Returns those of some items that have their line."""
        return self._index.written(seqs)

    def counts(self) -> Mapping[str, int]:
        """Returns the number of lines by state."""
        return dict(self._counts)

    def write(self, settled: Sequence[Settled]) -> None:
        """Appends lines of items that have none, syncs, and then records them.

        Raises:
            BulkOutputFailed: The file cannot be written; nothing was recorded.
        """
        by_seq = {one.seq: one for one in settled}
        known = self._index.written(sorted(by_seq))
        lines: list[Line] = []
        parts: list[bytes] = []
        end = self._end
        for seq, one in by_seq.items():
            if seq in known:
                continue
            data = self._form(one) + b"\n"
            lines.append(Line(seq, end, len(data), state_of(one)))
            parts.append(data)
            end += len(data)
        if not lines:
            return
        joined = b"".join(parts)
        self._append(joined)
        self._index.record(lines)
        self._end = end
        for line in lines:
            self._counts[line.state] = self._counts.get(line.state, 0) + 1
        if self._copy is not None:
            self._copy(joined)

    def _append(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise unwritable(self._place.partial, error) from None

    def drop(self, outcomes: Sequence[Outcome]) -> None:
        """Notes what was cancelled with the run: it is tried again as a later one."""
        self._index.try_again({o.seq: o.generation + 1 for o in outcomes})

    def close(self) -> None:
        """Closes the file."""
        try:
            self._file.close()
        except OSError as error:  # bytes that a full disk refused are written again
            _log.debug("closing %s: %s", self._place.partial, error)


def state_of(settled: Settled) -> State:
    """Returns the `State` of a line."""
    if not isinstance(settled, Done):
        return "refused"
    outcome = settled.outcome
    if outcome.state == "failed" and outcome.error is not None:
        kind = kind_of(outcome.error.code)
        # A file that an input names may be there the next time.
        if kind and issubclass(kind, InvalidRequest) and kind is not InputUnreadable:
            return "unfit"
    return outcome.state
