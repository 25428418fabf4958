"""What each process of a pool says of itself: `tm:process:<kind>:<id>`.

A card is for people and for Prometheus; nobody decides anything by it.
`announcing.py` writes it.
"""

import os
import secrets
import socket
import time
from typing import Literal

import msgspec

Kind = Literal["scheduler", "janitor", "worker", "gateway"]


class ProcessCard(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the pool."""

    kind: str
    id: str
    """Random, new at each start; a worker's is the name of its group."""
    host: str
    pid: int
    metrics_url: str | None = None
    """Where Prometheus reads it; None: metrics are off, or their package is missing."""
    address: str | None = None
    """Where it answers over HTTP, as `http://host:port`; None: it is no gateway."""
    version: str = ""
    started_ms: int = 0
    """By the clock of its host."""


def package_version() -> str:
    """Returns the version of the package that runs here."""
    # Late: this module is loaded while the package itself is.
    from .. import __version__

    return __version__


def make_card(
    kind: Kind,
    *,
    name: str | None = None,
    metrics_url: str | None = None,
    address: str | None = None,
) -> ProcessCard:
    """Returns the card of this process.

    Args:
        kind: What it is.
        name: Its id; None draws one.
        metrics_url: Where it serves metrics, if it does.
        address: Where it answers over HTTP, if it is a gateway.
    """
    return ProcessCard(
        kind=kind,
        id=name or secrets.token_hex(6),
        host=socket.gethostname(),
        pid=os.getpid(),
        metrics_url=metrics_url,
        address=address,
        version=package_version(),
        started_ms=time.time_ns() // 1_000_000,
    )
