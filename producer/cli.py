"""The producer's commands. Everything that takes time to import waits for a command."""

import typer

from .adapters.cli import register_lora
from .bulk.cli import register_bulk
from .cli_dead import register_dead
from .cli_gateway import register_gateway
from .cli_jobs import register_job_commands
from .cli_keys import register_keys
from .cli_submit import register_submit
from .cli_usage import register_usage
from .cli_webhooks import register_webhooks
from .demo.cli import register as register_demo
from .models.cli import register_models
from .watch.cli import register_top


def register(app: typer.Typer) -> None:
    """Adds the commands of producers and of those who watch a pool.

    Args:
        app: The command `tokenmill`.
    """
    register_demo(app)
    register_submit(app)
    register_job_commands(app)
    register_dead(app)
    register_bulk(app)
    register_gateway(app)
    register_keys(app)
    register_lora(app)
    register_models(app)
    register_top(app)
    register_usage(app)
    register_webhooks(app)
