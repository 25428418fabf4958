"""The producer's commands. Everything that takes time to import waits for a command."""

import typer

from .cli_dead import register_dead
from .cli_jobs import register_job_commands
from .cli_submit import register_submit
from .demo.cli import register as register_demo


def register(app: typer.Typer) -> None:
    """Adds submit, tail, jobs, show, cancel, models, dead and demo to the command.

    Args:
        app: The command `tokenmill`.
    """
    register_demo(app)
    register_submit(app)
    register_job_commands(app)
    register_dead(app)
