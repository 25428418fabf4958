"""`tokenmill lora add`, `list` and `remove`: the adapters that a pool serves."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ...shared.cli_lora import lora_group
from ...shared.cli_support import handle_errors
from ..cli_options import AsJson, Url, client_of
from ..cli_output import clock, print_json, print_note, print_table

if TYPE_CHECKING:
    from ...shared.adapters import AdapterCard

Model = Annotated[
    str | None, typer.Option(help="The base. Default: the only model of the pool.")
]
_MIB = 1024 * 1024


def register_lora(app: typer.Typer) -> None:
    """Adds the commands.

    Args:
        app: The command `tokenmill`.
    """
    group = lora_group(app)
    group.command("add")(add)
    group.command("list")(list_adapters)
    group.command("remove")(remove)


@handle_errors
async def add(
    name: Annotated[str, typer.Argument(help="By which requests ask for it.")],
    path: Annotated[
        Path, typer.Option(help="Directory of the checkpoint, as workers see it.")
    ],
    model: Model = None,
    tenant: Annotated[
        str | None, typer.Option(help="The only tenant that may use it.")
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Take the name from another adapter."),
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Register a LoRA adapter, once a worker of its model has read it."""
    async with client_of(url) as mill:
        card = await mill.add_adapter(
            name, path, model=model, tenant=tenant, replace=replace
        )
    if as_json:
        print_json(_shown(card))
        return
    print(f"{card.model}:{card.name}", flush=True)
    print_note(
        f"rank {card.rank}, {card.bytes / _MIB:.1f} MiB, digest {card.digest[:12]}; "
        f"ask for it with --adapter {card.name}"
    )
    for note in card.notes:
        print_note(f"warning: {note}")


@handle_errors
async def list_adapters(
    model: Annotated[str | None, typer.Option(help="Of this model alone.")] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Those that this tenant may use.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the adapters that are registered."""
    async with client_of(url) as mill:
        cards = await mill.adapters(model, tenant=tenant)
    if as_json:
        for card in cards:
            print_json(_shown(card))
        return
    rows = [
        [
            f"{card.model}:{card.name}",
            str(card.rank),
            f"{card.bytes / _MIB:.1f}",
            card.digest[:12],
            card.tenant or "-",
            clock(card.added_ms),
            card.path,
        ]
        for card in cards
    ]
    head = ("ADAPTER", "RANK", "MIB", "DIGEST", "TENANT", "ADDED", "PATH")
    print_table(head, rows)


@handle_errors
async def remove(
    name: Annotated[str, typer.Argument(help="As it was registered.")],
    model: Model = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Take an adapter's name away; what runs with it goes on, what waits fails."""
    async with client_of(url) as mill:
        card = await mill.remove_adapter(name, model=model)
    if as_json:
        print_json(_shown(card))
    else:
        print(f"{card.model}:{card.name} is removed")


def _shown(card: "AdapterCard") -> dict[str, object]:
    return msgspec.structs.asdict(card)
