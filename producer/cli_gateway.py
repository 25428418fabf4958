"""`tokenmill gateway`: OpenAI's API and the dashboard over HTTP."""

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from ..shared.cli_options import ConfigFile, RedisUrl
from ..shared.cli_support import handle_errors
from ..shared.pool.checks import register_check

if TYPE_CHECKING:
    from ..shared.config import Config
    from ..shared.redis import Finding

_NEEDED: Final = ("fastapi", "uvicorn", "multipart", "tokenizers")
_CURE: Final = "pip install 'tokenmill[gateway]'"


def register_gateway(app: typer.Typer) -> None:
    """Adds the command, and what `doctor` says of it.

    Args:
        app: The command `tokenmill`.
    """
    app.command("gateway")(handle_errors(gateway))
    register_check(check_gateway)


async def gateway(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0 takes a free one.")
    ] = None,
    url: RedisUrl = None,
    config: ConfigFile = None,
) -> None:
    """Serve OpenAI's API, jobs, batches and the dashboard over HTTP."""
    from ..shared.config_load import load_config
    from ..shared.connection import find_pool
    from ..shared.errors import ConfigError
    from ..shared.logging import configure

    absent = _absent()
    if absent:
        raise ConfigError(
            "gateway", f"needs the package '{absent[0]}', which is missing: {_CURE}"
        )
    from .gateway.server import serve

    settings = load_config(config).config
    given = {"host": host, "port": port}
    changes = {name: value for name, value in given.items() if value is not None}
    settings = msgspec.structs.replace(
        settings, gateway=msgspec.structs.replace(settings.gateway, **changes)
    )
    configure(settings.log, "gateway")
    await serve(settings, find_pool(url or settings.redis.url))


def _absent() -> list[str]:
    from importlib.util import find_spec

    return [name for name in _NEEDED if find_spec(name) is None]


def check_gateway(config: "Config") -> "list[Finding]":
    """Says whether a gateway can run here and whom it would let in.

    Args:
        config: Settings in force.
    """
    from ..shared.redis import Finding

    absent = _absent()
    if absent:
        message = f"not installed ({', '.join(absent)}); part of [gateway]: {_CURE}"
        return [Finding("info", "gateway", message, _CURE)]
    settings = config.gateway
    where = f"{settings.host}:{settings.port}"
    if settings.auth == "none":
        problem = f"listens on {where} and asks nobody for a key (gateway.auth = none)"
        cure = "set gateway.auth to auto or keys, and: tokenmill keys create"
        loopback = settings.host in {"127.0.0.1", "localhost", "::1"}
        return [Finding("info" if loopback else "warning", "gateway", problem, cure)]
    rule = (
        "keys are needed"
        if settings.auth == "keys"
        else "keys are needed beyond this host, and on it once there is one"
    )
    cors = ", ".join(settings.cors_origins) or "none"
    return [Finding("info", "gateway", f"{where}; {rule}; pages allowed: {cors}")]
