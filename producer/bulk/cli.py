"""`tokenmill bulk`: files of requests and documents."""

import typer

from .cli_manage import cancel, list_runs, retry, status
from .cli_work import run, summarize


def register_bulk(app: typer.Typer) -> None:
    """Adds the commands."""
    bulk = typer.Typer(
        help="Work off files of requests, and summarize documents.",
        no_args_is_help=True,
    )
    bulk.command("run")(run)
    bulk.command("summarize")(summarize)
    bulk.command("status")(status)
    bulk.command("list")(list_runs)
    bulk.command("cancel")(cancel)
    bulk.command("retry-failed")(retry)
    app.add_typer(bulk, name="bulk")
