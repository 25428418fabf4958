"""`tokenmill demo`."""

import typer

from ...shared.cli_support import handle_errors
from ...shared.messages import DEFAULT_MODEL


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command()
    @handle_errors
    async def demo(
        model: str = typer.Option(DEFAULT_MODEL, help="Model to ask."),
    ) -> None:
        """Start a pool here, stream a model's answers, show what they cost, stop."""
        from rich.console import Console

        from .run import run_demo

        await run_demo(model, Console(highlight=False))
