"""`tokenmill health KIND`: for a container's health check, one process of this host.

A process is well when its card in Redis is fresh (its event loop turns, and Redis hears
it); a gateway when it says so itself, which looks at the pool's progress too. Where a
gateway answers is on its card: on a free port the settings do not know it.
"""

import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from ..cli_options import ConfigFile, RedisUrl

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
    url: RedisUrl = None,
    config: ConfigFile = None,
) -> None:
    """Exit with 0 if a process of this kind on this host is well, else with 1."""
    from ..config_load import load_config
    from ..connection import find_pool
    from ..errors import TokenmillError

    if kind not in KINDS:
        raise typer.BadParameter(f"{kind!r}; expected one of {', '.join(KINDS)}")
    settings = load_config(config).config
    try:
        cards = await _cards(find_pool(url or settings.redis.url), kind)
    except TokenmillError:
        if kind != "gateway":
            raise
        cards, pid = [], None  # it says itself that Redis does not answer
    problem = _find(cards, kind, pid)
    if kind == "gateway" and (pid is None or not problem):
        problem = _ask_gateways(_addresses(cards, pid) or [_configured(settings)])
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


def _addresses(cards: "list[ProcessCard]", pid: int | None) -> list[str]:
    """Returns where this host's gateways answer, the newest first."""
    host = socket.gethostname()
    mine = [c for c in cards if c.host == host and pid in (None, c.pid)]
    mine.sort(key=lambda card: card.started_ms, reverse=True)
    return [card.address for card in mine if card.address is not None]


def _configured(settings: "Config") -> str:
    host = settings.gateway.host
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{settings.gateway.port}"


def _ask_gateways(addresses: Iterable[str]) -> str:
    """Returns what is wrong, or nothing if one of them is well.

    The card of one that was killed stays for some seconds beside its successor's.
    """
    problems = []
    for address in addresses:
        if not (problem := _ask_gateway(address)):
            return ""
        problems.append(problem)
    return problems[0]


def _ask_gateway(base: str) -> str:
    """Returns what is wrong, or nothing."""
    parts = urllib.parse.urlsplit(base)
    host = _EVERYWHERE.get(parts.hostname or "", parts.hostname)
    shown = f"[{host}]" if ":" in str(host) else host
    address = f"http://{shown}:{parts.port}/healthz"
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        return f"{address} answers {error.code}: {said}"
    except (urllib.error.URLError, OSError) as error:
        return f"{address} does not answer: {error}"
