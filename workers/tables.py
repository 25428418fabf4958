"""Tables for people, as commands of the worker print them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

from rich.console import Console, RenderableType
from rich.table import Table

_NARROWEST: Final = 80
_WIDEST: Final = 160
"""Off a terminal, so that paths and reasons stay on their lines."""


def table(title: str, *columns: str) -> Table:
    """Returns an empty table: the first column to the left, others to the right."""
    made = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left")
    return made


def pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Returns a table of names and what they stand for, which may take more lines."""
    made = table(title)
    made.show_header = False
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def write_out(parts: Iterable[RenderableType]) -> None:
    """Prints tables and lines, without the blanks that pad columns."""
    console = Console(highlight=False, markup=False)
    width = console.width if console.is_terminal else _WIDEST
    console = Console(highlight=False, markup=False, width=max(_NARROWEST, width))
    with console.capture() as drawn:
        for part in parts:
            console.print(part)
    lines = drawn.get().strip("\n").split("\n")
    sys.stdout.write("\n".join(line.rstrip() for line in lines) + "\n")
