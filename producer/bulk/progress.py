"""Progress of a bulk command: a live display on a terminal, plain lines off it."""

import sys
import time
from collections.abc import Callable
from typing import Final, Self

from ..cli_output import duration, print_json, print_note
from .flow import Progress

PLAIN_S: Final = 10.0
"""Time between two plain lines."""
JSON_S: Final = 1.0
"""Time between two lines of JSON."""


class Display:
    """Shows progress while its `with` block runs; this one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, progress: Progress) -> None:
        """Shows where the run is."""

    def close(self) -> None:
        """Ends the display."""


def display_for(*, as_json: bool, quiet: bool, unit: str) -> Display:
    """Returns the display that suits the place where it is seen.

    Args:
        as_json: Lines of JSON on standard output.
        quiet: Nothing at all.
        unit: What is counted, as `documents`.
    """
    if quiet:
        return Display()
    if as_json:
        return JsonLines()
    return Terminal(unit) if sys.stderr.isatty() else PlainLines(unit)


class _Paced(Display):
    """Shows something once in a while, and whenever something is newly missing."""

    every_s = PLAIN_S

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: float | None = None
        self._note: str | None = None

    def show(self, progress: Progress) -> None:
        """Writes a line if it is time for one."""
        now = self._now()
        due = self._last is None or now - self._last >= self.every_s
        told = progress.note is not None and self._note is None
        self._note = progress.note
        if due or told:
            self._last = now
            self.write(progress)

    def write(self, progress: Progress) -> None:
        """Writes one line."""
        raise NotImplementedError


class JsonLines(_Paced):
    """One JSON object a second on standard output."""

    every_s = JSON_S

    def write(self, progress: Progress) -> None:
        """Writes one line."""
        print_json({"progress": progress})


class PlainLines(_Paced):
    """One line in ten seconds on standard error.

    Args:
        unit: What is counted.
    """

    def __init__(self, unit: str, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now)
        self._unit = unit

    def write(self, progress: Progress) -> None:
        """Writes one line."""
        print_note(line_of(progress, self._unit))


def line_of(progress: Progress, unit: str) -> str:
    """Returns progress as one line of text.

    Args:
        progress: Where the run is.
        unit: What is counted.
    """
    total = "?" if progress.total is None else str(progress.total)
    parts = [f"{progress.settled}/{total} {unit}"]
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    parts += [f"{name} {value}" for name, value in _figures(progress)]
    if progress.note is not None:
        parts.append(progress.note)
    return f"run {progress.run}: {', '.join(parts)}"


def _figures(progress: Progress) -> list[tuple[str, str]]:
    figures = [("in the pool", str(progress.in_flight))]
    view = progress.view
    if view is not None and view.windows:
        figures.append(("windows", f"{view.jobs}/{view.windows}"))
    figures.append(("tokens/s", f"{progress.tokens_per_s:.0f}"))
    figures.append(("elapsed", duration(progress.elapsed_s * 1000)))
    if progress.eta_s is not None:
        figures.append(("left", duration(progress.eta_s * 1000)))
    return figures


class Terminal(Display):
    """A bar and figures that are drawn over and over, on standard error.

    Args:
        unit: What is counted.
    """

    def __init__(self, unit: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn(unit),
            expand=True,
        )
        self._task = self._bar.add_task("bulk", total=None)
        console = Console(stderr=True)
        self._live: Live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def close(self) -> None:
        """Takes the display away."""
        self._live.stop()

    def show(self, progress: Progress) -> None:
        """Draws where the run is."""
        from rich.console import Group, RenderableType
        from rich.text import Text

        self._bar.update(
            self._task,
            description=progress.run,
            completed=progress.settled,
            total=progress.total,
        )
        figures = Text("  ")
        for name, value in _figures(progress):
            figures.append(f"{name} ", style="dim")
            figures.append(f"{value}   ")
        errors = "red" if progress.failed else "dim"
        figures.append(f"failed {progress.failed}", style=errors)
        rows: list[RenderableType] = [self._bar, figures]
        if progress.note is not None:
            rows.append(Text(f"  {progress.note}", style="yellow"))
        self._live.update(Group(*rows), refresh=True)
