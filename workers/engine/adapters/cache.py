"""Adapters in memory: loaded once, kept while they are used, then by recency.

Any thread may load; whoever uses an adapter holds a lease on it, and what is leased is
never evicted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

import msgspec
import structlog

from ....shared.errors import AdapterUnavailable, ModelLoadError

if TYPE_CHECKING:
    from .checkpoint import AdapterFacts
    from .delta import Delta

_log = structlog.get_logger("tokenmill.adapters")
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that is ready to be used."""

    facts: AdapterFacts
    deltas: Mapping[str, Delta]
    """What to add, by the name of the model's module."""
    nbytes: int
    """Memory that it takes."""


class AdapterLoader(Protocol):
    """Reads adapters for one loaded model."""

    def check(self, path: Path) -> AdapterFacts:
        """Reads and checks an adapter, and keeps nothing."""
        ...

    def load(self, path: Path) -> LoadedAdapter:
        """Reads, checks and prepares an adapter."""
        ...


class AdapterSource(Protocol):
    """Where the engine and the model find adapters."""

    def lease(self, key: str) -> Lease:
        """Keeps a loaded adapter from eviction until the lease is released."""
        ...

    def get(self, key: str) -> LoadedAdapter:
        """Returns a loaded adapter; without a lease it may be gone the next moment."""
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


class _Entry:
    """A loaded adapter and how many hold it."""

    __slots__ = ("adapter", "holds")

    def __init__(self, adapter: LoadedAdapter) -> None:
        self.adapter = adapter
        self.holds = 0


class AdapterCache:
    """Keeps adapters within a number of bytes, the least recently leased goes first.

    Args:
        loader: Reads them.
        max_bytes: Memory that all of them may take.
    """

    def __init__(self, loader: AdapterLoader, max_bytes: int) -> None:
        self._loader = loader
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """By key; least recently leased first."""
        self._lock = threading.Lock()
        self._loading: dict[str, threading.Lock] = {}
        """One a key that is being loaded, so that it is read once."""
        self._bytes = 0
        self._loads = 0
        self._evictions = 0

    # --- loading ---------------------------------------------------------------------
    def load(self, key: str, path: Path, digest: str) -> Lease:
        """Makes an adapter ready and holds it.

        To be called off the engine's thread: reading takes time. Nobody sees the
        adapter before all of it has been checked. Of several callers of one key the
        first reads and the others wait for it.

        Args:
            key: Names this content, as "name@digest".
            path: The adapter's directory.
            digest: What its content must have.

        Returns:
            A lease, to be released once the engine has taken its own.

        Raises:
            ModelLoadError: It is damaged, of another base or of another content, or
                larger than the whole memory for adapters.
            AdapterUnavailable: There is no room while others are in use.
        """
        with self._lock:
            if key in self._entries:
                return self._hold(key)
            turn = self._loading.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                if key in self._entries:
                    return self._hold(key)
            try:
                adapter = self._loader.load(path)
                _check_digest(adapter, path, digest)
                with self._lock:
                    self._enter(key, adapter)
                    return self._hold(key)
            finally:
                with self._lock:
                    self._loading.pop(key, None)

    def check(self, path: Path) -> AdapterFacts:
        """Checks all of an adapter, values included, and keeps nothing of it.

        Args:
            path: The adapter's directory.

        Raises:
            ModelLoadError: It cannot be served; the message says why.
        """
        return self._loader.check(path)

    def _enter(self, key: str, adapter: LoadedAdapter) -> None:
        """Makes room for an adapter and takes it in."""
        if adapter.nbytes > self._max_bytes:
            raise ModelLoadError(
                f"adapter {key} takes {_mib(adapter.nbytes)} of memory and all "
                f"adapters together may take {_mib(self._max_bytes)}; raise "
                "worker.adapters_memory_mb, or give it a lower rank"
            )
        held = sum(e.adapter.nbytes for e in self._entries.values() if e.holds)
        if held + adapter.nbytes > self._max_bytes:
            raise AdapterUnavailable(
                f"adapter {key} takes {_mib(adapter.nbytes)} of memory, and "
                f"{_mib(held)} of {_mib(self._max_bytes)} are in use by running "
                "requests; try again when they end, or raise "
                "worker.adapters_memory_mb"
            )
        idle = [name for name, entry in self._entries.items() if not entry.holds]
        for name in idle:
            if self._bytes + adapter.nbytes <= self._max_bytes:
                break
            self._evict(name)
        self._entries[key] = _Entry(adapter)
        self._bytes += adapter.nbytes
        self._loads += 1
        _log.info("adapter_loaded", adapter=key, bytes=adapter.nbytes)

    def _evict(self, key: str) -> None:
        self._bytes -= self._entries.pop(key).adapter.nbytes
        self._evictions += 1
        _log.info("adapter_evicted", adapter=key)

    # --- use -------------------------------------------------------------------------
    def lease(self, key: str) -> Lease:
        """Holds an adapter that is loaded.

        Args:
            key: As given to `load`.

        Raises:
            AdapterUnavailable: It is not loaded.
        """
        with self._lock:
            if key not in self._entries:
                raise _not_loaded(key)
            return self._hold(key)

    def get(self, key: str) -> LoadedAdapter:
        """Returns an adapter that the caller holds a lease on.

        Args:
            key: As given to `load`.

        Raises:
            AdapterUnavailable: It is not loaded.
        """
        entry = self._entries.get(key)
        if entry is None:
            raise _not_loaded(key)
        return entry.adapter

    def _hold(self, key: str) -> Lease:
        entry = self._entries[key]
        entry.holds += 1
        self._entries.move_to_end(key)
        return Lease(entry.adapter, lambda: self._release(entry))

    def _release(self, entry: _Entry) -> None:
        with self._lock:
            entry.holds -= 1

    # --- what can be asked -----------------------------------------------------------
    def names(self) -> tuple[str, ...]:
        """Returns the keys of what is loaded, least recently leased first."""
        with self._lock:
            return tuple(self._entries)

    def stats(self) -> AdapterStats:
        """Returns counts and sizes."""
        with self._lock:
            return AdapterStats(
                loaded=len(self._entries),
                leased=sum(1 for entry in self._entries.values() if entry.holds),
                bytes=self._bytes,
                budget=self._max_bytes,
                loads=self._loads,
                evictions=self._evictions,
            )


def _check_digest(adapter: LoadedAdapter, path: Path, digest: str) -> None:
    if adapter.facts.digest != digest:
        raise ModelLoadError(
            f"{path} has changed since it was registered: its digest is "
            f"{adapter.facts.digest[:16]}…, expected {digest[:16]}…; register it "
            "again, or bring the old files back"
        )


def _not_loaded(key: str) -> AdapterUnavailable:
    return AdapterUnavailable(
        f"adapter {key} is not loaded; load it before a request asks for it"
    )


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"
