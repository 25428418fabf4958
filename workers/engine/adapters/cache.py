"""Adapters in memory: loaded once, kept while they are used, then by recency.

Any thread may load; whoever uses an adapter holds a lease on it, and what is leased is
never evicted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from ....shared.errors import AdapterUnavailable, ModelLoadError
from .source import AdapterLoader, AdapterStats, Lease, LoadedAdapter

if TYPE_CHECKING:
    from .checkpoint import AdapterFacts

_log = structlog.get_logger("tokenmill.adapters")
_MIB: Final = 1 << 20
_READS_AT_ONCE: Final = 4
"""What is read stands beside the adapters in memory until it is taken in; more than
one, so that a file system that is away delays no other at once."""
_PATIENCE_S: Final = 120.0
"""Longest wait for a read of others: theirs may never end."""
_MOST_SIZES: Final = 4096
"""Adapters whose size is remembered."""


class _Entry:
    """A loaded adapter and how many hold it."""

    __slots__ = ("adapter", "holds")

    def __init__(self, adapter: LoadedAdapter) -> None:
        self.adapter = adapter
        self.holds = 0


class _Turn:
    """Who reads an adapter, while others of the same key wait for it."""

    __slots__ = ("callers", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.callers = 0


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
        self._turns: dict[str, _Turn] = {}
        """One a key that is being loaded, so that it is read and entered once."""
        self._reading = threading.Semaphore(_READS_AT_ONCE)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """What adapters took when they were last read, so that one for which there is
        no room is not read again and again to find that out."""
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
            turn = self._turns.setdefault(key, _Turn())
            turn.callers += 1
        try:
            with _within_patience(turn.lock, key):
                return self._held(key) or self._read_in(key, path, digest)
        finally:
            with self._lock:
                turn.callers -= 1
                if not turn.callers:
                    del self._turns[key]

    def check(self, path: Path) -> AdapterFacts:
        """Checks all of an adapter, values and size included, and keeps nothing of it.

        Args:
            path: The adapter's directory.

        Raises:
            ModelLoadError: It cannot be served; the message says why.
        """
        with _within_patience(self._reading, str(path)):
            adapter = self._loader.load(path)
        adapter.drop()
        self._require_fit(str(path), adapter.nbytes)
        return adapter.facts

    def _held(self, key: str) -> Lease | None:
        with self._lock:
            if key in self._entries:
                return self._hold(key)
            self._require_room(key, self._sizes.get(key, 0))
            return None

    def _read_in(self, key: str, path: Path, digest: str) -> Lease:
        with _within_patience(self._reading, key):
            adapter = self._loader.load(path)
        try:
            _check_digest(adapter, path, digest)
            with self._lock:
                self._remember_size(key, adapter.nbytes)
                self._require_room(key, adapter.nbytes)
                evicted = self._enter(key, adapter)
                lease = self._hold(key)
        except BaseException:
            adapter.drop()
            raise
        for one in evicted:  # without the lock: other ranks have to be told
            one.drop()
        return lease

    def _remember_size(self, key: str, nbytes: int) -> None:
        self._sizes[key] = nbytes
        self._sizes.move_to_end(key)
        if len(self._sizes) > _MOST_SIZES:
            self._sizes.popitem(last=False)

    def _require_fit(self, name: str, nbytes: int) -> None:
        if nbytes > self._max_bytes:
            raise ModelLoadError(
                f"adapter {name} takes {_mib(nbytes)} of memory and all adapters "
                f"together may take {_mib(self._max_bytes)}; raise "
                "worker.adapters_memory_mb, or give it a lower rank"
            )

    def _require_room(self, key: str, nbytes: int) -> None:
        self._require_fit(key, nbytes)
        held = sum(e.adapter.nbytes for e in self._entries.values() if e.holds)
        if held + nbytes > self._max_bytes:
            raise AdapterUnavailable(
                f"adapter {key} takes {_mib(nbytes)} of memory, and {_mib(held)} of "
                f"{_mib(self._max_bytes)} are in use by running requests; try again "
                "when they end, or raise worker.adapters_memory_mb"
            )

    def _enter(self, key: str, adapter: LoadedAdapter) -> list[LoadedAdapter]:
        """Takes an adapter in; returns the idle ones that had to give way."""
        evicted = []
        idle = [name for name, entry in self._entries.items() if not entry.holds]
        for name in idle:
            if self._bytes + adapter.nbytes <= self._max_bytes:
                break
            evicted.append(self._evict(name))
        self._entries[key] = _Entry(adapter)
        self._bytes += adapter.nbytes
        self._loads += 1
        _log.info("adapter_loaded", adapter=key, bytes=adapter.nbytes)
        return evicted

    def _evict(self, key: str) -> LoadedAdapter:
        adapter = self._entries.pop(key).adapter
        self._bytes -= adapter.nbytes
        self._evictions += 1
        _log.info("adapter_evicted", adapter=key)
        return adapter

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
                keys=tuple(self._entries),
            )


@contextmanager
def _within_patience(
    lock: threading.Lock | threading.Semaphore, name: str
) -> Iterator[None]:
    if not lock.acquire(timeout=_PATIENCE_S):
        raise ModelLoadError(
            f"adapter {name} was not read: reads before it have taken {_PATIENCE_S:g} "
            "s; look at the file system of this host"
        )
    try:
        yield
    finally:
        lock.release()


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
