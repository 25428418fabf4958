"""`tokenmill webhooks`: what became of them, and delivering some again."""

import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ..shared.cli_support import handle_errors
from .cli_options import AsJson, Url
from .cli_output import duration, print_json, print_note, print_table

if TYPE_CHECKING:
    from ..shared.webhooks import Delivery, DeliveryState

_HEADER: Final = (
    *("ID", "TYPE", "STATE", "ATTEMPTS", "STATUS", "AGE", "NEXT", "TARGET", "ERROR"),
)
_SPARE: Final = ("ERROR", "TYPE", "TARGET", "NEXT", "AGE", "ATTEMPTS", "STATUS")
"""What a narrow terminal goes without; the id stays whole."""
_STATES: Final = ("pending", "delivered", "given_up")
_MOST_AGAIN: Final = 10_000

Tenant = Annotated[str | None, typer.Option(help="Only those of one tenant.")]


def register_webhooks(app: typer.Typer) -> None:
    """Adds the commands."""
    hooks = typer.Typer(
        help="Webhooks: what became of them, deliver again.", no_args_is_help=True
    )
    hooks.command("list")(list_webhooks)
    hooks.command("redeliver")(redeliver)
    app.add_typer(hooks, name="webhooks")


@handle_errors
async def list_webhooks(
    state: Annotated[
        str | None, typer.Option(help="Only those pending, delivered or given_up.")
    ] = None,
    tenant: Tenant = None,
    limit: Annotated[int, typer.Option(min=1, help="Most to show.")] = 50,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List deliveries, the last changed first."""
    from .client import Client

    async with Client(url) as mill:
        found = await mill.webhooks(state=_state(state), tenant=tenant, limit=limit)
    if as_json:
        for one in found:
            print_json(one)
        return
    now_ms = time.time() * 1000
    print_table(_HEADER, [_row(one, now_ms) for one in found], _SPARE)
    if not found:
        print_note("no webhooks")


def _state(name: str | None) -> "DeliveryState | None":
    if name is not None and name not in _STATES:
        raise typer.BadParameter(
            f"'{name}' is no state; expected one of {', '.join(_STATES)}"
        )
    return name  # type: ignore[return-value]


def _row(one: "Delivery", now_ms: float) -> list[str]:
    return [
        *(one.id, one.type, one.state, str(one.attempts), str(one.status or "-")),
        duration(now_ms - one.created_ms),
        duration(one.next_ms - now_ms) if one.next_ms else "-",
        *(one.target or "-", one.error or "-"),
    ]


@handle_errors
async def redeliver(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID…", help="As `list` shows them, or of jobs."),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="All that were given up.")
    ] = False,
    tenant: Tenant = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Have webhooks delivered once more; the janitor does it."""
    from .client import Client

    if bool(ids) == failed:
        raise typer.BadParameter("give ids, or --failed, and not both")
    async with Client(url) as mill:
        chosen = ids or [
            one.id
            for one in await mill.webhooks(
                state="given_up", tenant=tenant, limit=_MOST_AGAIN
            )
        ]
        await mill.redeliver(chosen)
    if as_json:
        print_json({"redelivering": len(chosen)})
    else:
        print(f"{len(chosen)} webhooks are delivered once more")
