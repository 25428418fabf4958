"""Adapters of a model that is split: every rank has its part of each, or none has any.

Rank 0 decides alone what is loaded and what leaves; the others do as they are told and
answer. Steps go on meanwhile, since nothing of this goes through their exchanges.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ....shared.errors import AdapterUnavailable, ModelLoadError, TokenmillError
from ..adapters.source import LoadedAdapter
from .adapter_orders import AdapterOrder, DropOrder, LoadAnswer, LoadOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..adapters.source import AdapterLoader
    from .adapter_orders import Followers

PATIENCE_S: Final = 120.0
"""Longest wait for the other ranks' reads: one may never end."""
_MOST_READS: Final = 16
"""Of a follower at a time. Rank 0 begins four; more are those that it gave up."""


class GroupLoader:
    """Rank 0's loader of adapters, which has all other ranks load their parts, too.

    Args:
        own: Reads rank 0's part.
        followers: The other ranks.
        patience_s: Longest wait for them.
    """

    def __init__(
        self,
        own: AdapterLoader,
        followers: Followers,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._own = own
        self._followers = followers
        self._patience_s = patience_s
        self._numbers = itertools.count(1)
        self._waiting: dict[str, queue.SimpleQueue[tuple[int, LoadAnswer]]] = {}
        """Loads under way, by ticket."""
        followers.on_answer(self._hear)

    def load(self, path: Path) -> LoadedAdapter:
        """Has every rank read, check and prepare its part of an adapter.

        Args:
            path: The adapter's directory, as every rank sees it.

        Returns:
            Rank 0's part; `nbytes` is that of the rank where it takes most.

        Raises:
            ModelLoadError: A rank cannot serve it, has read other content or does not
                answer. No rank keeps anything of it.
        """
        ticket = str(next(self._numbers))
        answers = self._waiting[ticket] = queue.SimpleQueue()
        try:
            self._followers.tell(LoadOrder(ticket, str(path)))
            own = self._own.load(path)
            largest = self._agreed(path, own, answers)
        except BaseException:
            self._drop(ticket)
            raise
        finally:
            del self._waiting[ticket]
        return replace(
            own,
            nbytes=max(own.nbytes, largest),
            ticket=ticket,
            on_dropped=partial(self._drop, ticket),
        )

    def _agreed(
        self,
        path: Path,
        own: LoadedAdapter,
        answers: queue.SimpleQueue[tuple[int, LoadAnswer]],
    ) -> int:
        """Returns the most bytes that a follower's part takes, once all have one."""
        until = time.monotonic() + self._patience_s
        largest = 0
        for _ in range(self._followers.size):
            try:
                left_s = max(0.0, until - time.monotonic())
                rank, answer = answers.get(timeout=left_s)
            except queue.Empty:
                raise ModelLoadError(
                    f"{path} was not read by every rank within {self._patience_s:g} s; "
                    "look at the file system of this host"
                ) from None
            if answer.problem is not None:
                raise ModelLoadError(f"rank {rank} cannot load it: {answer.problem}")
            if answer.digest != own.facts.digest:
                raise ModelLoadError(
                    f"{path} changed while the ranks read it: rank {rank} has found "
                    f"the digest {answer.digest[:16]}…, rank 0 "
                    f"{own.facts.digest[:16]}…; try again"
                )
            largest = max(largest, answer.bytes)
        return largest

    def _hear(self, rank: int, answer: LoadAnswer) -> None:
        answers = self._waiting.get(answer.ticket)
        if answers is not None:  # else it was given up, and the rank has been told
            answers.put((rank, answer))

    def _drop(self, ticket: str) -> None:
        self._followers.tell(DropOrder(ticket))


class FollowerAdapters:
    """A follower's parts of adapters, by ticket, where its steps find them.

    Args:
        loader: Reads this rank's parts.
        answer: Takes what rank 0 is to know, from any thread.
    """

    def __init__(
        self, loader: AdapterLoader, answer: Callable[[LoadAnswer], None]
    ) -> None:
        self._loader = loader
        self._answer = answer
        self._lock = threading.Lock()
        self._reading: set[str] = set()
        """Loads under way that are still wanted."""
        self._num_reads = 0
        self._held: dict[str, LoadedAdapter] = {}

    def hear(self, order: AdapterOrder) -> None:
        """Does what rank 0 says; reads in a thread of its own.

        Args:
            order: The next one.
        """
        if isinstance(order, DropOrder):
            # Rank 0 drops what no request holds. Their last step has met all ranks
            # since this one looked its adapters up, so none is missed here.
            with self._lock:
                self._reading.discard(order.ticket)
                self._held.pop(order.ticket, None)
            return
        with self._lock:
            is_late = self._num_reads >= _MOST_READS
            if not is_late:
                self._num_reads += 1
                self._reading.add(order.ticket)
        if is_late:
            problem = (
                f"{_MOST_READS} reads before it do not end; look at the file system of "
                "this host"
            )
            self._answer(LoadAnswer(ticket=order.ticket, problem=problem))
            return
        threading.Thread(
            target=self._load, args=(order,), name="adapter", daemon=True
        ).start()

    def _load(self, order: LoadOrder) -> None:
        adapter, answer = self._read(order)
        with self._lock:
            self._num_reads -= 1
            if order.ticket not in self._reading:
                return
            self._reading.remove(order.ticket)
            if adapter is not None:
                self._held[order.ticket] = adapter
        self._answer(answer)

    def _read(self, order: LoadOrder) -> tuple[LoadedAdapter | None, LoadAnswer]:
        try:
            adapter = self._loader.load(Path(order.path))
        except TokenmillError as error:
            return None, LoadAnswer(ticket=order.ticket, problem=str(error))
        except Exception as error:  # noqa: BLE001 - told to rank 0, fails this one alone
            problem = f"{type(error).__name__}: {error}"
            return None, LoadAnswer(ticket=order.ticket, problem=problem)
        return adapter, LoadAnswer(
            ticket=order.ticket, digest=adapter.facts.digest, bytes=adapter.nbytes
        )

    def get(self, key: str) -> LoadedAdapter:
        """Returns an adapter that a step's plan names.

        Args:
            key: Its ticket.

        Raises:
            AdapterUnavailable: Rank 0 has dropped it, or never had it loaded.
        """
        adapter = self._held.get(key)
        if adapter is None:
            raise AdapterUnavailable(
                f"the plan of a step names the adapter of load {key}, which this rank "
                "does not have"
            )
        return adapter

    def tickets(self) -> frozenset[str]:
        """Returns the loads whose adapters are held."""
        with self._lock:
            return frozenset(self._held)
