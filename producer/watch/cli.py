"""`tokenmill top`: the pool, live."""

from typing import Annotated

import typer

from ...shared.cli_support import handle_errors
from ..cli_output import print_json

_PATIENCE_S = 1.0
"""The view itself says that Redis is away, and looks again."""


def register_top(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("top")(top)


@handle_errors
async def top(
    every: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once and leave, as off a terminal.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=0, max=500, help="Newest jobs with --once or --json.")
    ] = 20,
    url: Annotated[
        str | None, typer.Option(help="The pool's Redis; default: find it.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Look once, print one JSON object.")
    ] = False,
) -> None:
    """Show queues, workers, speed, latencies and the newest jobs, live; q ends it."""
    from ..client import Client
    from .view import look

    if as_json:
        async with Client(url) as mill:
            print_json(await look(mill, jobs=jobs))
        return
    from rich.console import Console

    from .top import Top, screen_of

    console = Console(highlight=False)
    if once or not console.is_terminal:
        async with Client(url) as mill:
            view = await look(mill, jobs=jobs)
        console.print(screen_of(view, console, whole=True))
        return
    async with Client(url, patience_s=_PATIENCE_S) as mill:
        await Top(mill, console, every).run()
