"""`tokenmill health KIND`: for a container's health check, one process of this host.

A process is well when its card in Redis is fresh (its event loop turns, and Redis hears
it); a gateway when it says so itself, which looks at the pool's progress too.
"""

import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

if TYPE_CHECKING:
    from ..config import Config
    from ..process_card import ProcessCard

KINDS: Final = ("scheduler", "janitor", "worker", "gateway")
_TIMEOUT_S: Final = 5.0
"""A check that hangs is as bad as one that fails; docker's own limit is above this."""
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104


async def health(
    kind: Annotated[str, typer.Argument(help=", ".join(KINDS))],
    pid: Annotated[
        int | None, typer.Option(help="Its process id, where several run here.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Redis URL of the pool.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file (TOML).")
    ] = None,
) -> None:
    """Exit with 0 if a process of this kind on this host is well, else with 1."""
    from ..config_load import load_config
    from ..connection import find_pool

    if kind not in KINDS:
        raise typer.BadParameter(f"{kind!r}; expected one of {', '.join(KINDS)}")
    settings = load_config(config).config
    if kind == "gateway":
        problem = _ask_gateway(settings)
    else:
        pool = find_pool(url or settings.redis.url)
        cards = await _cards(pool, kind)
        problem = _find(cards, kind, pid)
    if problem:
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(1)


async def _cards(url: str, kind: str) -> "list[ProcessCard]":
    """Returns the fresh cards of one kind; a card expires when nobody renews it."""
    from ..keys import PROCESSES, process_key
    from ..process_card import ProcessCard
    from ..redis import connect, translate

    client = connect(url, socket_timeout_s=_TIMEOUT_S)
    try:
        with translate():
            members = [m.decode() for m in await client.zrange(PROCESSES, 0, -1)]
            mine = [m for m in members if m.startswith(f"{kind}:")]
            raw = await client.mget([process_key(m) for m in mine]) if mine else []
    finally:
        await client.aclose()
    return [msgspec.json.decode(r, type=ProcessCard) for r in raw if r is not None]


def _find(cards: "list[ProcessCard]", kind: str, pid: int | None) -> str:
    """Returns what is wrong, or nothing."""
    host = socket.gethostname()
    here = [c for c in cards if c.host == host and pid in (None, c.pid)]
    if here:
        return ""
    which = f"{kind} with process id {pid}" if pid is not None else kind
    return (
        f"no {which} on {host} has renewed its card in Redis within 30 s; "
        f"fresh cards of other {kind}s: {len(cards)}"
    )


def _ask_gateway(settings: "Config") -> str:
    """Returns what is wrong, or nothing."""
    host = _EVERYWHERE.get(settings.gateway.host, settings.gateway.host)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{settings.gateway.port}/healthz"
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        return f"{address} answers {error.code}: {said}"
    except (urllib.error.URLError, OSError) as error:
        return f"{address} does not answer: {error}"
