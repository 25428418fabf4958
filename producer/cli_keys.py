"""`tokenmill keys`: API keys of the gateway."""

from typing import TYPE_CHECKING, Annotated

import typer

from ..shared.api_keys import Scope
from ..shared.cli_support import handle_errors
from .cli_options import AsJson, Url, client_of
from .cli_output import clock, print_json, print_note, print_table

if TYPE_CHECKING:
    from ..shared.api_keys import KeyRecord, KeyStore
    from .client import Client


def register_keys(app: typer.Typer) -> None:
    """Adds the commands.

    Args:
        app: The command `tokenmill`.
    """
    keys = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)
    keys.command("create")(create)
    keys.command("list")(list_keys)
    keys.command("revoke")(revoke)
    app.add_typer(keys, name="keys")


def _store(mill: "Client") -> "KeyStore":
    from ..shared.api_keys import KeyStore

    return KeyStore(mill.session.redis)


@handle_errors
async def create(
    tenant: Annotated[str, typer.Option(help="Whose jobs it submits and sees.")],
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What it may do; may be repeated.")
    ] = None,
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it: nothing can show it again."""
    from ..shared.redis import translate

    scopes = scope or [Scope.INFERENCE, Scope.BATCH, Scope.READ]
    async with client_of(url) as mill:
        with translate():
            secret, record = await _store(mill).create(tenant, scopes, name)
    if as_json:
        print_json({"key": secret, **_shown(record)})
        return
    print(secret)
    print_note(
        f"{record.id}: tenant {record.tenant}, {', '.join(record.scopes)}; keep it "
        "now, it cannot be shown again"
    )


@handle_errors
async def list_keys(
    all_keys: Annotated[bool, typer.Option("--all", help="Revoked ones too.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the keys, the oldest first."""
    from ..shared.redis import translate

    async with client_of(url) as mill:
        with translate():
            records = await _store(mill).records()
    shown = [one for one in records if all_keys or one.revoked_ms is None]
    if as_json:
        for record in shown:
            print_json(_shown(record))
        return
    rows = [
        [
            record.id,
            record.tenant,
            ",".join(record.scopes),
            clock(record.created_ms),
            clock(record.revoked_ms) if record.revoked_ms else "-",
            record.name or "-",
        ]
        for record in shown
    ]
    print_table(("KEY", "TENANT", "SCOPES", "CREATED", "REVOKED", "NAME"), rows)


@handle_errors
async def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Its id, key-…")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """End a key; gateways know it within seconds."""
    from ..shared.redis import translate

    async with client_of(url) as mill:
        with translate():
            record = await _store(mill).revoke(key)
    if as_json:
        print_json(_shown(record))
    else:
        print(f"{record.id} of tenant {record.tenant} is revoked")


def _shown(record: "KeyRecord") -> dict[str, object]:
    return {
        "id": record.id,
        "tenant": record.tenant,
        "scopes": list(record.scopes),
        "name": record.name,
        "created_ms": record.created_ms,
        "revoked_ms": record.revoked_ms,
    }
