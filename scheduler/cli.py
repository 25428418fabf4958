"""Commands of the scheduler: schedule, janitor."""

from typing import Annotated

import typer

from ..shared.cli_options import ConfigFile, RedisUrl
from ..shared.cli_support import handle_errors


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command("schedule")(handle_errors(schedule))
    app.command("janitor")(handle_errors(janitor))


async def schedule(
    url: RedisUrl = None,
    config: ConfigFile = None,
    standby: Annotated[
        bool, typer.Option(help="Let a scheduler that starts now go first.")
    ] = False,
) -> None:
    """Dispatch waiting jobs to workers; a second scheduler stands by for the first."""
    from ..shared.config_load import load_config
    from ..shared.connection import find_pool
    from ..shared.logging import configure
    from ..shared.redis import connect
    from ..shared.tokens import without_torch
    from .loop import serve
    from .outage import require_redis

    settings = load_config(config).config
    configure(settings.log, "scheduler")
    without_torch()
    client = connect(
        find_pool(url or settings.redis.url),
        socket_timeout_s=settings.redis.socket_timeout_s,
        max_connections=settings.redis.max_connections,
    )
    try:
        await require_redis(client)
        code = await serve(client, settings, standby=standby)
    finally:
        await client.aclose()
    raise typer.Exit(code)


async def janitor(url: RedisUrl = None, config: ConfigFile = None) -> None:
    """Advance bulk runs; clean up old dead letters, groups that are gone, lost jobs."""
    from ..shared.config_load import load_config
    from ..shared.connection import find_pool
    from ..shared.logging import configure
    from ..shared.redis import connect
    from ..shared.tokens import without_torch
    from .orchestrator import serve
    from .outage import require_redis

    settings = load_config(config).config
    configure(settings.log, "janitor")
    without_torch()
    pool = find_pool(url or settings.redis.url)
    client = connect(pool, socket_timeout_s=settings.redis.socket_timeout_s)
    try:
        await require_redis(client)
    finally:
        await client.aclose()
    code = await serve(pool, settings)
    raise typer.Exit(code)
