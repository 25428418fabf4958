"""The end of an output: put in order, packed, renamed; and its way back for retries.

Renames and the index cannot change together. So the index says first what is about to
be renamed, and whoever opens it next does what a crash left undone.
"""

import errno
import gzip
import os
import zlib
from collections.abc import Iterator
from typing import IO, Final

from ...shared.errors import BulkRunConflict
from .index import RETRIED, Index, Line
from .off_loop import Check, go_on
from .place import Place, sync_directory, unwritable
from .reading import chunks, open_input

RUNNING: Final = "running"
FINISHED: Final = "finished"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def finish(place: Place, index: Index, *, ordered: bool, check: Check = go_on) -> None:
    """Makes the output of the partial file.

    Args:
        place: The output.
        index: Its index.
        ordered: Lines are to stand in input order.
        check: Called now and then; may raise to stop, and then nothing is changed.

    Raises:
        BulkOutputFailed: It cannot be written; the partial file stays.
    """
    try:
        assembled = ordered or place.is_gzip
        if assembled:
            _assemble(place, index, ordered, check)
        index.set_facts(phase=FINISHED, assembled=assembled)
        _rename(place, index)
    except OSError as error:
        raise unwritable(place.output, error) from None


def _rename(place: Place, index: Index) -> None:
    whole = place.assembled if index.fact("assembled", bool) else place.partial
    if whole.exists():
        whole.replace(place.output)
        sync_directory(place.output.parent)
    place.partial.unlink(missing_ok=True)


def recover(place: Place, index: Index) -> None:
    """Does the rename that a crash left undone.

    Args:
        place: The output.
        index: Its index.
    """
    try:
        if index.fact("pending", bool):
            _take_remade(place, index)
        if index.fact("phase", str) == FINISHED:
            _rename(place, index)
        else:
            place.assembled.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(place.output, error) from None


def _assemble(place: Place, index: Index, ordered: bool, check: Check) -> None:
    with place.partial.open("rb") as lines, place.assembled.open("wb") as raw:
        parts = _checked(_in_order(lines, index) if ordered else chunks(lines), check)
        if place.is_gzip:
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                for part in parts:
                    packed.write(part)
        else:
            raw.writelines(parts)
        raw.flush()
        os.fsync(raw.fileno())


def _in_order(file: IO[bytes], index: Index) -> Iterator[bytes]:
    for line in index.lines(ordered=True):
        yield os.pread(file.fileno(), line.length, line.offset)


def _checked(parts: Iterator[bytes], check: Check) -> Iterator[bytes]:
    for part in parts:
        check()
        yield part


def prepare_retry(
    place: Place, index: Index, *, ordered: bool, check: Check = go_on
) -> int:
    """Makes a partial file of all lines but those whose items are to run again.

    The output stays where it is until the new one takes its place.

    Args:
        place: The output.
        index: Its index.
        ordered: Lines of a finished output stand in input order.
        check: Called now and then; may raise to stop, and then nothing is changed.

    Returns:
        How many items are to run again; with none, nothing was changed.

    Raises:
        BulkRunConflict: The output is not what its index describes.
        BulkOutputFailed: There is no room for the other lines.
    """
    counts = index.counts()
    num_again = sum(counts.get(state, 0) for state in RETRIED)
    if not num_again:
        return 0
    is_finished = index.fact("phase", str) == FINISHED
    path = place.output if is_finished else place.partial
    try:
        with open_input(path) as source, place.remade.open("wb") as kept:
            in_order = ordered and is_finished
            lines = _kept(source, kept, index.lines(ordered=in_order), check)
            index.replace_lines(lines, before_commit=lambda: _sync(kept))
        _take_remade(place, index)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise unwritable(place.remade, error) from None
        raise BulkRunConflict(f"{path} cannot be read: {error}") from None
    return num_again


def _kept(
    source: IO[bytes], kept: IO[bytes], lines: Iterator[Line], check: Check
) -> Iterator[Line]:
    end = 0
    for line in lines:
        check()
        data = source.read(line.length)
        if len(data) != line.length or not data.endswith(b"\n"):
            raise BulkRunConflict(
                "the output was changed since it was written, so its failed lines "
                "cannot be told; put it back, or begin again with --restart"
            )
        if line.state not in RETRIED:
            kept.write(data)
            yield Line(line.seq, end, line.length, line.state)
            end += line.length


def _take_remade(place: Place, index: Index) -> None:
    if place.remade.exists():
        place.remade.replace(place.partial)
        sync_directory(place.partial.parent)
    index.set_facts(pending=False)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
