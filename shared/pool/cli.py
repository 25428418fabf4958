"""Commands of the pool: up, doctor, config show."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..cli_options import ConfigFile, EngineKind, PrintJson, RedisUrl
from ..cli_support import handle_errors
from .cli_health import health

_GivenRedis = Annotated[
    str | None, typer.Option("--url", help="Use this Redis; none is started.")
]
_StateDir = Annotated[Path | None, typer.Option(help="Data, logs and connection file.")]
_Workers = Annotated[int | None, typer.Option(min=0, help="Workers per model.")]
_Models = Annotated[
    list[str] | None,
    typer.Option(help="Directory, .gguf file, hub id or name; may be repeated."),
]
_NoWorker = Annotated[bool, typer.Option("--no-worker", help="Start no workers.")]
_NoJanitor = Annotated[bool, typer.Option("--no-janitor", help="Start no janitor.")]
_Gateway = Annotated[
    bool, typer.Option("--gateway", help="Serve HTTP too, with a dashboard.")
]
_GatewayPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Port of the gateway; 0 takes a free one."),
]
_Standby = Annotated[int, typer.Option(min=0, max=8, help="Schedulers that stand by.")]
_Profile = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="Time workers' steps into this directory."),
]
_ReadyFile = Annotated[Path | None, typer.Option(help="Written when the pool serves.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command("up")(handle_errors(up))
    app.command("doctor")(handle_errors(doctor))
    app.command("health")(handle_errors(health))
    settings = typer.Typer(help="Settings in force.", no_args_is_help=True)
    settings.command("show")(handle_errors(show_config))
    # A group with one command needs a callback to stay a group.
    settings.callback()(_settings_group)
    app.add_typer(settings, name="config")


def _settings_group() -> None:
    """Settings in force."""


def up(
    config: ConfigFile = None,
    url: _GivenRedis = None,
    state_dir: _StateDir = None,
    workers: _Workers = None,
    model: _Models = None,
    no_worker: _NoWorker = False,
    no_janitor: _NoJanitor = False,
    gateway: _Gateway = False,
    gateway_port: _GatewayPort = None,
    standby: _Standby = 0,
    engine: EngineKind = "model",
    profile: _Profile = None,
    ready_file: _ReadyFile = None,
) -> None:
    """Start Redis if none is given, scheduler, janitor, workers; keep them up."""
    from .plan import PoolOptions
    from .starting import Overrides, start

    options = PoolOptions(
        config_path=config,
        engine=engine,
        num_schedulers=1 + standby,
        with_workers=not no_worker,
        with_janitor=not no_janitor,
        with_gateway=gateway or gateway_port is not None,
        gateway_port=gateway_port,
        profile=profile,
    )
    if profile is not None:
        profile.mkdir(parents=True, exist_ok=True)
    overrides = Overrides(
        url=url, state_dir=state_dir, workers=workers, models=tuple(model or ())
    )
    raise typer.Exit(start(options, overrides, ready_file))


async def doctor(
    config: ConfigFile = None, url: RedisUrl = None, as_json: PrintJson = False
) -> None:
    """Say what is installed, what falls back and why, and what is wrong, with cures."""
    from ..config_load import load_config
    from ..logging import configure
    from .doctor import examine, has_errors, print_findings

    settings = load_config(config).config
    # What is found is what this prints; how a check went is not told line by line.
    configure(msgspec.structs.replace(settings.log, level="error"), "doctor")
    findings = await examine(settings, url)
    if as_json:
        print(msgspec.json.encode(findings).decode())
    else:
        print_findings(findings)
    if has_errors(findings):
        raise typer.Exit(1)


def show_config(config: ConfigFile = None, as_json: PrintJson = False) -> None:
    """Print every setting, its value and where it came from."""
    from ..config_load import load_config

    rows = load_config(config).rows()
    if as_json:
        table = [
            {"key": key, "value": value, "origin": origin}
            for key, value, origin in rows
        ]
        print(msgspec.json.encode(table).decode())
        return
    key_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(_shown(value)) for _, value, _ in rows)
    for key, value, origin in rows:
        print(f"{key:<{key_width}}  {_shown(value):<{value_width}}  {origin}")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}={one}" for key, one in value.items()) or "-"
    return str(value)
