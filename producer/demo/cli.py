"""`tokenmill demo`."""

import typer

from ...shared.cli_support import handle_errors
from ...shared.messages import DEFAULT_MODEL


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command()
    @handle_errors
    def demo(
        model: str = typer.Option(DEFAULT_MODEL, help="Model to ask."),
    ) -> None:
        """Start a pool here, stream a model's answers, show what they cost, stop."""
        import asyncio

        from rich.console import Console

        from .run import run_demo

        asyncio.run(run_demo(model, Console(highlight=False)))
