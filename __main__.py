"""The composition root: joins the folders' commands into one `tokenmill`.

It alone may know every folder. A folder whose extra is not installed keeps its
commands visible; running one says which extra to install.
"""

import typer

from .producer.cli import register as register_producer
from .scheduler.cli import register as register_scheduler
from .shared.pool.cli import register as register_pool
from .workers.cli import register as register_workers


def build_app() -> typer.Typer:
    """Returns the command-line application with every sub-command."""
    app = typer.Typer(
        name="tokenmill",
        help="An asynchronous message-queue worker pool for LLM inference.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    register_pool(app)
    register_producer(app)
    register_scheduler(app)
    register_workers(app)
    return app


def main() -> None:
    """Entry point of the `tokenmill` command."""
    build_app()()


if __name__ == "__main__":
    main()
