"""A tensor-parallel group whose ranks are threads of this process.

torch's groups know no process, only connections, so the code is what runs in processes.
A group is made once and used for many models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self, TypeVar

from tokenmill.workers.engine.adapters.cache import AdapterCache
from tokenmill.workers.engine.adapters.serving import follow_adapters, serve_adapters
from tokenmill.workers.engine.model.lean_import import import_transformers
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.runner import TransformersRunner
from tokenmill.workers.engine.parallel.adapter_orders import AdapterOrder, LoadAnswer
from tokenmill.workers.engine.parallel.adapters import FollowerAdapters
from tokenmill.workers.engine.parallel.communicator import Communicator, connect_group
from tokenmill.workers.engine.parallel.runner import LeadingRunner, follow
from tokenmill.workers.engine.parallel.shard import Shard

T = TypeVar("T")
ADAPTERS: Final = 1 << 26
"""Bytes for adapters on each rank."""


_turn = threading.Lock()


def load_in_turn(
    path: Path, end: Communicator, **options: object
) -> TransformersRunner:
    """Loads while no other thread does: accelerate changes torch's modules for all.

    Where ranks agree on something the next one may go on.
    """
    numbers = end.numbers

    def meanwhile(own: int) -> tuple[int, ...]:
        _turn.release()
        try:
            return numbers(own)
        finally:
            _turn.acquire()

    with _turn:
        end.numbers = meanwhile
        try:
            return load_runner(path, communicator=end, **options)
        finally:
            del end.numbers


class ThreadFollowers:
    """Carries orders for adapters to ranks that are threads, and answers back."""

    def __init__(self) -> None:
        self.adapters: Sequence[FollowerAdapters] = ()
        """Of ranks 1 and up."""
        self.told: list[AdapterOrder] = []
        self._hear: Callable[[int, LoadAnswer], None] | None = None

    @property
    def size(self) -> int:
        return len(self.adapters)

    def tell(self, order: AdapterOrder) -> None:
        self.told.append(order)
        for adapters in self.adapters:
            adapters.hear(order)

    def on_answer(self, callback: Callable[[int, LoadAnswer], None]) -> None:
        self._hear = callback

    def answering(self, rank: int) -> Callable[[LoadAnswer], None]:
        """Returns where a rank's answers go."""

        def answer(given: LoadAnswer) -> None:
            assert self._hear is not None
            self._hear(rank, given)

        return answer


class Ranks:
    """Connects a group; use it as a context manager.

    Args:
        size: Ranks.
        rendezvous: A file of this group alone.
        timeout_s: For an exchange.
    """

    def __init__(self, size: int, rendezvous: Path, timeout_s: float = 30.0) -> None:
        self.size = size
        # A thread for each rank, so that what one waits for can always run.
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        self.ends: list[Communicator] = self._on_each(
            lambda rank: connect_group(
                Shard(rank, size), rendezvous, timeout_s=timeout_s
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for end in self.ends:
            end.close()
        for thread in self._threads:
            thread.shutdown()

    def each(self, task: Callable[[Communicator], T]) -> list[T]:
        """Runs a task on every rank at once; returns results in the order of ranks."""
        return self._on_each(lambda rank: task(self.ends[rank]))

    def start(self, rank: int, task: Callable[[Communicator], T]) -> Future[T]:
        """Begins a task on one rank."""
        return self._threads[rank].submit(task, self.ends[rank])

    def load(self, path: Path, **options: object) -> list[TransformersRunner]:
        """Loads a model on every rank."""
        import_transformers()
        options = {"threads": 1, "device": "cpu", **options}
        return self.each(lambda end: load_in_turn(path, end, **options))

    @contextmanager
    def serving(self, path: Path, **options: object) -> Iterator[LeadingRunner]:
        """Loads a model on every rank and leads; the other ranks follow until the end.

        Args:
            path: The checkpoint.
            **options: Of `load_runner`.
        """
        with self._leading(self.load(path, **options)) as leading:
            yield leading

    @contextmanager
    def serving_adapters(
        self, path: Path, max_bytes: int = ADAPTERS, **options: object
    ) -> Iterator[tuple[LeadingRunner, AdapterCache, ThreadFollowers]]:
        """The same with adapters, which every rank has its part of.

        Args:
            path: The checkpoint.
            max_bytes: For adapters on each rank.
            **options: Of `load_runner`.
        """
        runners, followers = self.load(path, **options), ThreadFollowers()
        followers.adapters = [
            follow_adapters(runners[rank], followers.answering(rank))
            for rank in range(1, self.size)
        ]
        with self._leading(runners) as leading:
            cache = serve_adapters(leading, max_bytes=max_bytes, followers=followers)
            yield leading, cache, followers

    @contextmanager
    def _leading(self, runners: list[TransformersRunner]) -> Iterator[LeadingRunner]:
        following = [
            self.start(rank, lambda end, runner=runners[rank]: follow(runner, end))
            for rank in range(1, self.size)
        ]
        leading = LeadingRunner(runners[0], self.ends[0])
        try:
            yield leading
        finally:
            leading.close()
            for future in following:
                future.result(timeout=60)

    def _on_each(self, task: Callable[[int], T]) -> list[T]:
        futures = [
            thread.submit(task, rank) for rank, thread in enumerate(self._threads)
        ]
        done, _ = wait(futures, timeout=120, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()  # who failed says more than those who waited for it
        return [future.result(timeout=0) for future in futures]
