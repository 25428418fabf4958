"""A table in the columns of a terminal: what is least wanted is left out."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Final

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

Cell = str | Text
_GAP: Final = 2
"""Blank columns between two cells."""


def fitted(
    header: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    width: int,
    *,
    left: int = 1,
    drop: Sequence[str] = (),
    short: Callable[[str], str] | None = None,
    empty: Text,
) -> Table:
    """Returns a table that no cell of is cut off in, if that can be had.

    Args:
        header: Names of the columns.
        rows: Their cells.
        width: Columns of the terminal.
        left: How many of the columns are set to the left.
        drop: Names of columns to leave out where there is no room, the first first.
        short: Shortens cells of the first column, before any column is left out.
        empty: Said when there are no rows.
    """
    columns = [
        (name, [row[index] for row in rows], index < left)
        for index, name in enumerate(header)
    ]
    if not rows:
        columns[0] = (columns[0][0], [empty], True)
    if short is not None and _needed(columns) > width:
        name, cells, is_left = columns[0]
        columns[0] = (name, [short(str(cell)) for cell in cells], is_left)
    for unwanted in drop:
        if _needed(columns) <= width:
            break
        columns = [column for column in columns if column[0] != unwanted]
    table = Table(
        box=None,
        padding=(0, _GAP, 0, 0),
        pad_edge=False,
        header_style="bold",
        show_edge=False,
    )
    for name, _, is_left in columns:
        table.add_column(name, justify="left" if is_left else "right", no_wrap=True)
    for row in zip_longest(*(cells for _, cells, _ in columns), fillvalue=""):
        table.add_row(*row)
    return table


def _needed(columns: Sequence[tuple[str, list[Cell], bool]]) -> int:
    widths = (
        max(map(cell_len, (name, *map(str, cells)))) for name, cells, _ in columns
    )
    return sum(widths) + _GAP * (len(columns) - 1)
