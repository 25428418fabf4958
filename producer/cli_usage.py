"""`tokenmill usage`: what tenants have used."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from ..shared.cli_support import handle_errors
from .cli_output import print_json, print_note, print_table

if TYPE_CHECKING:
    from ..shared.usage import UsageRow

_HEADER: Final = (
    *("DAY", "TENANT", "MODEL", "JOBS", "FAILED", "CANCELLED", "EXPIRED"),
    *("PROMPT TOKENS", "OUTPUT TOKENS"),
)
_SPARE: Final = ("EXPIRED", "CANCELLED", "FAILED", "MODEL")
"""What a narrow terminal goes without."""


def register_usage(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("usage")(show_usage)


@handle_errors
async def show_usage(
    tenant: Annotated[
        str | None, typer.Option(help="Of one tenant; default: all.")
    ] = None,
    days: Annotated[int, typer.Option(help="How many days, today included.")] = 30,
    url: Annotated[
        str | None, typer.Option(help="The pool's Redis; default: find it.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line.")
    ] = False,
) -> None:
    """Show jobs and tokens by day (UTC), tenant and model."""
    from .client import Client

    async with Client(url) as mill:
        rows = await mill.usage(tenant, days)
    if as_json:
        for row in rows:
            print_json(row)
        return
    total = [sum(numbers) for numbers in zip(*map(_numbers, rows), strict=True)]
    table = [[row.day, row.tenant, row.model, *map(str, _numbers(row))] for row in rows]
    if rows:
        table.append(["total", "", "", *map(str, total)])
    print_table(_HEADER, table, _SPARE)
    if not rows:
        print_note(f"nothing was used in the last {days} days")


def _numbers(row: "UsageRow") -> tuple[int, ...]:
    return (
        *(row.jobs, row.failed, row.cancelled, row.expired),
        *(row.prompt_tokens, row.completion_tokens),
    )
