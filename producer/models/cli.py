"""`tokenmill models`: the models of the pool, and the life of their versions."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...shared.cli_support import handle_errors
from ..cli_options import AsJson, Url, client_of
from ..cli_output import print_json, print_note, print_table
from .cli_describing import as_workers_find_it, config_of, read_devices
from .cli_tables import print_report, print_versions, shares_line

if TYPE_CHECKING:
    from ..client import Client
    from .info import VersionInfo

Name = Annotated[str, typer.Argument(metavar="MODEL", help="Public name.")]
Version = Annotated[str, typer.Argument(help="Name of the version.")]
WaitS = Annotated[
    float, typer.Option("--timeout", min=0, help="Longest wait in seconds.")
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait for its end.")]


def register_models(app: typer.Typer) -> None:
    """Adds the commands.

    Args:
        app: The command `tokenmill`.
    """
    group = typer.Typer(help="Models of the pool and their versions.")
    group.callback(invoke_without_command=True)(models)
    commands: dict[str, Callable[..., object]] = {
        "list": list_versions,
        "add": add,
        "load": load,
        "shadow": shadow,
        "switch": switch,
        "rollback": rollback,
        "drain": drain,
        "remove": remove,
        "retire": retire,
    }
    for name, command in commands.items():
        group.command(name)(command)
    app.add_typer(group, name="models")


@handle_errors
async def models(
    context: typer.Context, url: Url = None, as_json: AsJson = False
) -> None:
    """List the models of the pool and how many workers serve each."""
    if context.invoked_subcommand is not None:
        return
    async with client_of(url) as mill:
        found = await mill.models()
    if as_json:
        for info in found:
            print_json(info)
        return
    rows = [
        [
            info.name,
            str(info.num_groups),
            str(info.card.max_context) if info.card else "-",
            ("yes" if info.card.has_chat_template else "no") if info.card else "-",
            info.card.weights_version if info.card else "-",
        ]
        for info in found
    ]
    print_table(("MODEL", "WORKERS", "CONTEXT", "CHAT", "WEIGHTS"), rows)


@handle_errors
async def list_versions(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Default: all.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List versions: state, share, workers, weights, health, copies."""
    async with client_of(url) as mill:
        found = await mill.model_versions(model)
    if as_json:
        for info in found:
            print_json(info)
        return
    print_versions(found)


@handle_errors
async def add(
    model: Name,
    version: Version,
    path: Annotated[
        str | None, typer.Option(help="Directory, .gguf file or hub id.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="int8, float32, bfloat16, nf4, ...")
    ] = None,
    kv: Annotated[str | None, typer.Option(help="int8, int4 or float32.")] = None,
    tp: Annotated[int | None, typer.Option(help="Processes a replica.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Workers.")] = None,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="NUMBER",
            help="CUDA device by its number in nvidia-smi, as 0; repeatable.",
        ),
    ] = None,
    health: Annotated[
        Path | None, typer.Option(help="Checks that must pass, JSON lines.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Describe a version to the pool; `load` starts it."""
    from ...shared.health_set import read_health_set

    checks = None if health is None else read_health_set(health)
    options: dict[str, object] = {
        "path": None if path is None else as_workers_find_it(path),
        "weights": weights,
        "kv": kv,
        "tp": tp,
        "replicas": replicas,
        "devices": None if devices is None else read_devices(devices) or None,
    }
    async with client_of(url) as mill:
        info = await mill.add_version(config_of(model, version, options), checks)
    if as_json:
        print_json(info)
    else:
        print(
            f"{version} of {model} added; next: tokenmill models load {model} {version}"
        )


def _waiting_command(
    step: "Callable[[Client], Callable[..., Awaitable[VersionInfo]]]",
    show: "Callable[[VersionInfo], None]",
    help_text: str,
) -> Callable[..., object]:
    """Returns a command that takes a step of a version and waits until it is done.

    Args:
        step: Of a client.
        show: Prints the version after it, for people.
        help_text: What the command does.
    """

    async def command(
        model: Name,
        version: Version,
        wait_s: WaitS = 600.0,
        no_wait: NoWait = False,
        url: Url = None,
        as_json: AsJson = False,
    ) -> None:
        async with client_of(url) as mill:
            info = await step(mill)(
                model, version, wait_s=None if no_wait else wait_s, tell=print_note
            )
        if as_json:
            print_json(info)
        else:
            show(info)

    command.__doc__ = help_text
    return handle_errors(command)


load = _waiting_command(
    lambda mill: mill.load_version,
    lambda info: print_versions([info]),
    "Load a version beside the others; it gets no jobs until a switch.",
)
drain = _waiting_command(
    lambda mill: mill.drain_version,
    lambda info: print(f"{info.version} of {info.model} is {info.state}"),
    "End a version without a share: what it runs ends there, its workers stop.",
)


@handle_errors
async def shadow(
    model: Name,
    version: Version,
    percent: Annotated[
        float | None,
        typer.Option(help="Part of the traffic to copy; 0 ends it."),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Only show how copies compare.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Copy traffic to a version and compare; nothing of it is published."""
    from ...shared.errors import InvalidRequest

    if percent is None and not report:
        raise InvalidRequest("--percent", "is missing; expected it, or --report")
    async with client_of(url) as mill:
        if percent is None:
            found = await mill.shadow_report(model, version)
        else:
            found = await mill.shadow_version(model, version, percent)
    if as_json:
        print_json(found)
    elif percent is None or report:
        print_report(found)
    else:
        what = f"{percent:g} % of the traffic is" if percent else "nothing is"
        print(f"{what} copied to {version} of {model}")


@handle_errors
async def switch(
    model: Name,
    version: Version,
    percent: Annotated[
        float, typer.Option(help="Its share; the others divide the rest.")
    ] = 100.0,
    force: Annotated[
        bool,
        typer.Option("--force", help="Even if it cannot serve the model's adapters."),
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Give new jobs to a version from now on, or a part of them."""
    async with client_of(url) as mill:
        shares = await mill.switch_version(
            model, version, percent, force=force, tell=print_note
        )
    _print_shares(model, shares, as_json=as_json)


@handle_errors
async def rollback(
    model: Name, wait_s: WaitS = 600.0, url: Url = None, as_json: AsJson = False
) -> None:
    """Give new jobs to whom they went before the last switch."""
    async with client_of(url) as mill:
        shares = await mill.rollback_version(model, wait_s=wait_s, tell=print_note)
    _print_shares(model, shares, as_json=as_json)


def _print_shares(model: str, shares: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        print_json({"model": model, "shares": shares})
    else:
        print(f"new jobs of {model} go to {shares_line(shares)}")


@handle_errors
async def remove(
    model: Name, version: Version, url: Url = None, as_json: AsJson = False
) -> None:
    """Forget a version that is stopped; its name is free again."""
    async with client_of(url) as mill:
        await mill.remove_version(model, version)
    if as_json:
        print_json({"model": model, "version": version, "removed": True})
    else:
        print(f"{version} of {model} is forgotten")


@handle_errors
async def retire(
    model: Name, wait_s: WaitS = 600.0, url: Url = None, as_json: AsJson = False
) -> None:
    """End a model that the settings do not name: jobs, workers, versions; forget it."""
    async with client_of(url) as mill:
        await mill.retire_model(model, wait_s=wait_s, tell=print_note)
    if as_json:
        print_json({"model": model, "retired": True})
    else:
        print(f"{model} is forgotten")
