"""The end of a batch: the files of its answers and of its errors.

Runs on the driver's thread and may be done again from the beginning: the names are
those of the record, and each object becomes visible whole.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Final

import msgspec

from ...shared.bulk.messages import Outcome
from ...shared.errors import BulkOutputFailed
from ...shared.messages import JobError
from ..bulk.flow import Done, Entry, Fed, Settled
from ..bulk.line_source import LineSource
from ..bulk.sink import Form, state_of
from .batches_models import BatchRecord
from .batches_parts import PartLine, Parts
from .files_store import FilesStore

_ENDED_EARLY: Final = {
    "expired": JobError(
        "batch_expired",
        "the request was not done before the batch's completion window was over",
    ),
    "cancelled": JobError(
        "batch_cancelled", "the request was not done before the batch was cancelled"
    ),
    "failed": JobError(
        "batch_failed", "the request was not done before the batch failed"
    ),
}


class Assembled(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    output_bytes: int
    """0: there is no such file."""
    error_bytes: int
    completed: int
    failed: int
    """Requests that ended badly or were refused; none that was never done."""


class _Object:
    """An object that is made with its first line."""

    def __init__(self, store: FilesStore, name: str, stack: ExitStack) -> None:
        self._store = store
        self._name = name
        self._stack = stack
        self._file: IO[bytes] | None = None
        self.num_bytes = 0
        self.num_lines = 0

    def write(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._stack.enter_context(self._store.putting(self._name))
        self._file.write(data)
        self.num_bytes += len(data)
        self.num_lines += 1


def assemble(
    store: FilesStore,
    record: BatchRecord,
    parts: Parts,
    rest: LineSource | None,
    form: Form,
    ended: str,
    stop: threading.Event,
) -> Assembled:
    """Writes the files of a batch.

    Args:
        store: Where files are.
        record: The batch.
        parts: Its lines so far.
        rest: Its input without what has a line; None where all of it was read.
        form: Makes lines.
        ended: Status that the batch will have.
        stop: Set by another thread when nobody wants them any more.

    Raises:
        CancelledError: `stop` was set; nothing was written.
        BulkOutputFailed: Lines of a batch that did not fail are missing; nothing was
            written.
    """
    seen = bytearray()
    with ExitStack() as stack:
        output = _Object(store, f"{record.tenant}/{record.output_id}", stack)
        errors = _Object(store, f"{record.tenant}/{record.error_id}", stack)
        for name in parts.names():
            for line in parts.read(name):
                _go_on(stop)
                if _is_new(seen, line.seq):
                    target = output if line.state == "succeeded" else errors
                    target.write(line.data)
        num_failed = errors.num_lines
        for line in _undone(rest, form, ended):
            _go_on(stop)
            if _is_new(seen, line.seq):
                errors.write(line.data)
                num_failed += line.state == "refused"
        if ended != "failed":
            _check_whole(record, output.num_lines + errors.num_lines)
    return Assembled(
        output_bytes=output.num_bytes,
        error_bytes=errors.num_bytes,
        completed=output.num_lines,
        failed=num_failed,
    )


def _check_whole(record: BatchRecord, num_lines: int) -> None:
    """Nobody is told that a batch has ended while a line of it is not there."""
    if num_lines != record.total:
        raise BulkOutputFailed(
            f"{record.id} has {num_lines} lines of output and errors; expected "
            f"{record.total}. What is missing runs again"
        )


def _undone(rest: LineSource | None, form: Form, ended: str) -> Iterator[PartLine]:
    """An error line for every request that was never done."""
    for entry in () if rest is None else rest.entries():
        settled = _given_up(entry, ended)
        yield PartLine(settled.seq, state_of(settled), form(settled) + b"\n")


def _given_up(entry: Entry, ended: str) -> Settled:
    if not isinstance(entry, Fed):
        return entry
    item, error = entry.item, _ENDED_EARLY[ended]
    outcome = Outcome(
        seq=item.seq, custom_id=item.custom_id, state="cancelled", error=error
    )
    return Done(fed=entry, outcome=outcome)


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise asyncio.CancelledError


def _is_new(seen: bytearray, seq: int) -> bool:
    """Whether a line has not come before; from here on it has."""
    place, bit = seq >> 3, 1 << (seq & 7)
    if place >= len(seen):
        seen.extend(bytes(max(place + 1 - len(seen), 4096)))
    if seen[place] & bit:
        return False
    seen[place] |= bit
    return True
