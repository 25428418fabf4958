"""`tokenmill mps`: the daemon of shared CUDA devices, run and looked at."""

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from ..shared.cli_options import ConfigFile, PrintJson
from ..shared.cli_support import handle_errors
from ..shared.pool.checks import register_check

if TYPE_CHECKING:
    from ..shared.config import Config
    from ..shared.mps import DeviceSet
    from ..shared.redis import Finding

EXIT_GONE: Final = 75
"""EX_TEMPFAIL: the daemon went; whoever supervises starts it again."""


def register(app: typer.Typer) -> None:
    """Adds the group of commands to `app`, and a check to `doctor`."""
    group = typer.Typer(
        help="CUDA's Multi-Process Service for devices that workers share.",
        no_args_is_help=True,
    )
    group.command("run")(handle_errors(run))
    group.command("status")(handle_errors(status))
    app.add_typer(group, name="mps")
    register_check(_check)


def _check(config: "Config") -> list["Finding"]:
    from .mps_health import findings

    return findings(config)


async def run(
    devices: Annotated[str, typer.Option(help="Numbers of devices, as 0,1.")],
    pipes: Annotated[
        Path | None, typer.Option(help="Directory of pipes; a short path.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Directory of logs.")] = None,
    config: ConfigFile = None,
) -> None:
    """Start the MPS daemon of these devices and keep it until a signal.

    A daemon that runs already is used and left running at the end.
    """
    from ..shared.config_load import load_config
    from ..shared.errors import ConfigError
    from ..shared.logging import configure
    from ..shared.mps import find_control, why_not
    from .mps import Daemon, keep

    settings = load_config(config).config
    configure(settings.log, "mps")
    one = _device_set(settings, devices, pipes, logs)
    reason = why_not(settings.mps, one.devices, one.pipes)
    program = find_control(settings.mps)
    if reason is not None or program is None:
        raise ConfigError("mps", f"devices {one.name} cannot be shared: {reason}")
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    gone = await keep(Daemon.of(one, program, settings.mps), stopping)
    if gone is not None:
        typer.echo(f"error: {gone}", err=True)
        raise typer.Exit(EXIT_GONE)


def _device_set(
    settings: "Config", numbers: str, pipes: Path | None, logs: Path | None
) -> "DeviceSet":
    import os

    from ..shared.connection import state_dir
    from ..shared.cuda_devices import chosen, devices_here
    from ..shared.errors import ConfigError
    from ..shared.mps import DeviceSet, directories

    words = [word.strip() for word in numbers.split(",")]
    if not all(word.isdecimal() for word in words):
        problem = f"value {numbers!r}; expected numbers with commas between, as 0,1"
        raise ConfigError("devices", problem, "command line")
    wanted = tuple(sorted(set(map(int, words))))
    own = chosen(devices_here(os.environ), wanted, "devices")
    usual_pipes, usual_logs = directories(state_dir(settings), wanted)
    return DeviceSet(
        numbers=wanted,
        devices=tuple(own),
        pipes=(pipes or usual_pipes).absolute(),
        logs=(logs or usual_logs).absolute(),
        is_ours=True,
    )


def status(config: ConfigFile = None, as_json: PrintJson = False) -> None:
    """Say where MPS is used on this host, by whom, and where not and why."""
    from ..shared.config_load import load_config
    from ..shared.logging import configure
    from .mps_health import state_of

    settings = load_config(config).config
    configure(settings.log, "mps")
    state = state_of(settings)
    if as_json:
        print(msgspec.json.encode(state).decode())
        return
    if state.why is not None:
        print(f"off: {state.why}")
    for devices, reason in state.off.items():
        print(f"devices {devices}: off: {reason}")
    for one in state.sets:
        servers = ", ".join(f"{s.pid} {s.status}" for s in one.servers) or "none"
        word = "answers" if one.answers else "no daemon answers"
        print(
            f"devices {one.devices}: {word}; servers: {servers}; clients: "
            f"{one.clients}; pipes: {one.pipes}"
        )
