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
    from ...shared.adapters_fit import Fit

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
    force: Annotated[
        bool,
        typer.Option("--force", help="Even if not all versions that serve can use it."),
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Register a LoRA adapter, once a worker of its model has read it."""
    async with client_of(url) as mill:
        card = await mill.add_adapter(
            name, path, model=model, tenant=tenant, replace=replace, force=force
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
    """List the adapters that are registered, and what versions cannot serve."""
    from .fitting import fits_of

    async with client_of(url) as mill:
        cards = await mill.adapters(model, tenant=tenant)
        fits = await fits_of(mill.session, cards)
    if as_json:
        for card, fit in zip(cards, fits, strict=True):
            print_json({**_shown(card), "versions": fit})
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
    for card, fit in zip(cards, fits, strict=True):
        if note := _not_served(card, fit):
            print_note(note)


def _not_served(card: "AdapterCard", fit: "Fit") -> str:
    """What a person has to know of who serves an adapter; empty: nothing."""
    name = f"{card.model}:{card.name}"
    if fit.unable:
        reasons = "; ".join(f"{v} ({why})" for v, why in fit.unable.items())
        if fit.able or fit.unasked:
            return f"{name} cannot be served by {reasons}: its jobs fail there"
        return (
            f"{name} is served by no version that gets jobs: not by {reasons}. Go back "
            f"(tokenmill models rollback {card.model}), or remove it (tokenmill lora "
            f"remove {card.name} --model {card.model})"
        )
    if fit.unasked:
        return (
            f"{name} was not checked on {', '.join(fit.unasked)}, of other weights; "
            "`tokenmill lora add` once more checks it"
        )
    return ""


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
