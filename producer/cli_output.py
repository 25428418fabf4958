"""How the producer's commands print: text that flushes, JSON lines, plain tables."""

import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Final

from ..shared.messages import Delta, JobResult, encode
from .info import JobInfo

_CONTROLS: Final = {
    code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))
} | {9: "\t", 10: "\n", 13: "\r"}
"""A model's output must not move the cursor or set the title of a terminal."""


def print_json(record: object) -> None:
    """Writes one JSON object on one line, and flushes."""
    sys.stdout.write(encode(record).decode() + "\n")
    sys.stdout.flush()


def print_text(text: str) -> None:
    """Writes text as it is, without a line break, and flushes."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_note(text: str) -> None:
    """Writes a remark for a person to standard error."""
    print(text, file=sys.stderr, flush=True)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Writes names and their values, a line each."""
    for name, value in facts:
        print(f"{name:<14}{value}")


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    spare: Sequence[str] = (),
) -> None:
    """Writes aligned columns; nothing is cut, since ids are there to be copied.

    Args:
        header: Names of the columns.
        rows: Cells.
        spare: Columns that a narrow terminal goes without, the least wanted first.
    """
    lines = (header, *([_one_line(cell) for cell in row] for row in rows))
    columns = list(zip(*lines, strict=True))
    if sys.stdout.isatty():
        columns = fit_columns(columns, shutil.get_terminal_size().columns, spare)
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def fit_columns(
    columns: Sequence[tuple[str, ...]], width: int, spare: Sequence[str]
) -> list[tuple[str, ...]]:
    """Leaves columns out, in the order of `spare`, until a row fits into `width`.

    Args:
        columns: Each the header and its cells.
        width: Characters of a line.
        spare: Headers of columns that may go.
    """
    left = list(columns)
    for name in spare:
        if sum(max(map(len, column)) + 2 for column in left) - 2 <= width:
            break
        left = [column for column in left if column[0] != name]
    return left


def _one_line(cell: str) -> str:
    return cell.translate(_CONTROLS | {9: " ", 10: "\\n", 13: "\\r"})


class DeltaPrinter:
    """Prints a stream as it comes.

    Args:
        as_json: One JSON object a delta instead of text.
        num_choices: With more than one, a mark shows whose text follows.
    """

    def __init__(self, *, as_json: bool, num_choices: int = 1) -> None:
        self._as_json = as_json
        self._marked = num_choices > 1
        self._choice: int | None = None

    def write(self, delta: Delta) -> None:
        """Prints one delta."""
        if self._as_json:
            print_json(delta)
            return
        if not delta.text:
            return
        if self._choice is None:
            self._marked = self._marked or delta.choice > 0
        if delta.choice != self._choice and (self._marked or self._choice is not None):
            start = "" if self._choice is None else "\n"
            print_text(f"{start}[{delta.choice}] ")
        self._choice = delta.choice
        print_text(delta.text)

    def close(self) -> None:
        """Ends the line that the text stands on."""
        if not self._as_json and self._choice is not None:
            print_text("\n")


def print_result(result: JobResult, *, as_json: bool) -> None:
    """Prints a result: its text, or the whole record as JSON."""
    if as_json:
        print_json(result)
        return
    for choice in result.choices:
        mark = f"[{choice.index}] " if len(result.choices) > 1 else ""
        print_text(f"{mark}{choice.text}\n")


def job_row(info: JobInfo, now_ms: float) -> list[str]:
    """Cells of one job for a table; see `JOB_HEADER`."""
    if info.problem is not None:
        return [info.id, info.state, *("-" for _ in JOB_HEADER[2:])]
    end_ms = info.finished_ms or now_ms
    begin_ms = info.enqueued_ms or now_ms
    return [
        info.id,
        info.state,
        info.job_class,
        info.tenant,
        str(info.prompt_tokens),
        duration(now_ms - begin_ms),
        duration(end_ms - begin_ms),
    ]


JOB_HEADER: Final = ("JOB", "STATE", "CLASS", "TENANT", "TOKENS", "AGE", "TOOK")
JOB_SPARE: Final = ("TENANT", "CLASS", "TOKENS", "TOOK", "AGE", "STATE")
"""What a narrow terminal goes without; the id stays whole."""


def duration(milliseconds: float) -> str:
    """A length of time as a person writes it: `0.4s`, `12s`, `3m05s`, `2h10m`."""
    seconds = max(0.0, milliseconds / 1000)
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    if seconds < 3600:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"


def clock(milliseconds: int | None) -> str:
    """A moment of Redis' clock in local time, or `-`."""
    if milliseconds is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(milliseconds / 1000))
