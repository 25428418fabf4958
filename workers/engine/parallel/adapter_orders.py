"""What rank 0 tells the other ranks of adapters, and what they answer. No torch here.

It goes beside the exchanges of steps, which must never wait for a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec


class LoadOrder(msgspec.Struct, frozen=True, tag="load"):
    """Read your part of an adapter, and keep it until it is dropped."""

    ticket: str
    """Names this load, in the answer and in the plans of steps."""
    path: str
    """The adapter's directory."""


class DropOrder(msgspec.Struct, frozen=True, tag="drop"):
    """Let go of what a load has brought or is still to bring."""

    ticket: str


AdapterOrder = LoadOrder | DropOrder


class LoadAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="adapter"):
    """How a load went on one rank."""

    ticket: str
    digest: str = ""
    """Of the content that was read."""
    bytes: int = 0
    """Memory that the rank's part takes."""
    problem: str | None = None
    """Why it cannot be served; None: it can."""


class Followers(Protocol):
    """The other ranks, as rank 0 reaches them while steps run."""

    @property
    def size(self) -> int:
        """How many."""
        ...

    def tell(self, order: AdapterOrder) -> None:
        """Sends an order to each of them, in the order of calls."""
        ...

    def on_answer(self, callback: Callable[[int, LoadAnswer], None]) -> None:
        """Has each answer handed on, with the rank that it is from, from any thread."""
        ...
