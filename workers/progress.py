"""Progress of long steps: a bar on a terminal, plain lines off it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Report = Callable[[str, float], None]


@contextmanager
def bar(title: str, *, silent: bool = False) -> Iterator[Report]:
    """Shows progress on standard error for the length of a `with` block.

    Args:
        title: What is being done.
        silent: Show nothing.

    Yields:
        A function of a stage's name and its fraction done.
    """
    if silent:
        yield lambda _stage, _fraction: None
    elif sys.stderr.isatty():
        with _rich_bar(title) as report:
            yield report
    else:
        yield lines(title, sys.stderr)


def lines(title: str, stream: TextIO) -> Report:
    """Returns a progress function that writes a line a quarter of each stage.

    Args:
        title: What is being done; starts each line.
        stream: Where lines go.
    """
    shown: dict[str, int] = {}

    def report(stage: str, fraction: float) -> None:
        quarter = int(fraction * 4)
        if quarter > shown.get(stage, -1):
            shown[stage] = quarter
            stream.write(f"{title}: {stage} {fraction:.0%}\n")
            stream.flush()

    return report


@contextmanager
def _rich_bar(title: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(f"{title}: {stage}", total=1.0)
            progress.update(tasks[stage], completed=fraction)

        yield report
