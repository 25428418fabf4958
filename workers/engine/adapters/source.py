"""What the engine and the model see of adapters in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

if TYPE_CHECKING:
    from .checkpoint import AdapterFacts
    from .delta import Delta


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that is ready to be used."""

    facts: AdapterFacts
    deltas: Mapping[str, Delta]
    """What to add, by the name of the model's module."""
    nbytes: int
    """Memory that it takes; of a split model, on the rank where it takes most."""
    ticket: str = ""
    """What other ranks know it by; empty where the model is not split."""
    on_dropped: Callable[[], None] | None = None
    """Has other ranks let go of their parts."""

    def drop(self) -> None:
        """To be called once nobody will use it."""
        if self.on_dropped is not None:
            self.on_dropped()


class AdapterLoader(Protocol):
    """Reads adapters for one loaded model."""

    def load(self, path: Path) -> LoadedAdapter:
        """Reads, checks and prepares an adapter."""
        ...


class HeldAdapters(Protocol):
    """Where the model finds adapters."""

    def get(self, key: str) -> LoadedAdapter:
        """Returns a loaded adapter; without a lease it may be gone the next moment."""
        ...


class AdapterSource(HeldAdapters, Protocol):
    """Where the engine finds them, too."""

    def lease(self, key: str) -> Lease:
        """Keeps a loaded adapter from eviction until the lease is released."""
        ...


class AdapterStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache holds and has done."""

    loaded: int
    leased: int
    """Of these, adapters that are in use."""
    bytes: int
    budget: int
    """Bytes at most."""
    loads: int
    evictions: int
    keys: tuple[str, ...] = ()
    """Of those loaded; least recently leased first."""


class Lease:
    """A hold on a loaded adapter. Releasing twice is harmless.

    Args:
        adapter: What is held.
        release: Ends the hold.
    """

    def __init__(self, adapter: LoadedAdapter, release: Callable[[], None]) -> None:
        self.adapter = adapter
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Lets the adapter be evicted again."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
