"""What the commands of a pool's user have in common: which pool, and what form."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .client import Client

Url = Annotated[str | None, typer.Option(help="The pool's Redis; default: find it.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


def client_of(url: str | None) -> "Client":
    """Returns a client, whose module is loaded only by a command that runs.

    Args:
        url: Where the pool's Redis is; None finds it.
    """
    from .client import Client

    return Client(url)
