"""The composition root: joins the folders' commands into one `tokenmill`.

It alone may know every folder. A folder whose extra is not installed keeps its
commands visible; running one says which extra to install.

Only the standard library's lightest modules are imported before `main` runs, so that
an interrupt during the rest of the start-up finds a handler.
"""

import sys
from typing import TYPE_CHECKING

from .shared.signals import end_at_once

if TYPE_CHECKING:
    import typer


def build_app() -> "typer.Typer":
    """Returns the command-line application with every sub-command."""
    import typer

    from .producer.cli import register as register_producer
    from .scheduler.cli import register as register_scheduler
    from .shared.pool.cli import register as register_pool
    from .workers.cli import register as register_workers

    app = typer.Typer(
        name="tokenmill",
        help="An asynchronous message-queue worker pool for LLM inference.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: bool = typer.Option(
            False,
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Print the version and leave.",
        ),
    ) -> None:
        """An asynchronous message-queue worker pool for LLM inference."""

    register_pool(app)
    register_producer(app)
    register_scheduler(app)
    register_workers(app)
    return app


def _print_version(wanted: bool) -> None:
    import typer

    from . import __version__

    if wanted:
        typer.echo(f"tokenmill {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the `tokenmill` command."""
    end_at_once()
    from .shared.cli_support import run_app
    from .shared.timeouts import repair_timeouts

    repair_timeouts()

    sys.exit(run_app(build_app, sys.argv[1:]))


if __name__ == "__main__":
    main()
