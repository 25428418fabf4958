"""What a follower of a tensor-parallel group is told, and how ranks share a host."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from ..shared.config import LogConfig, ModelConfig, WorkerConfig
from ..shared.config_load import PREFIX, RESERVED_PREFIXES

Backend = Literal["gloo", "nccl"]

_KEPT: Final = ("TOKENMILL_KERNELS", "TOKENMILL_DEBUG", *RESERVED_PREFIXES)
"""Of our variables, those that a follower may see. The others are settings, which come
with its order; among them are addresses with passwords, and secrets of webhooks."""


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One follower's task: the first line on its standard input, as JSON."""

    group: str
    """Of the worker, for log lines."""
    rank: int
    """From 1; the worker itself is rank 0."""
    size: int
    leader: int
    """Process id of rank 0, with which this one ends."""
    path: str
    """The model's directory, resolved by the leader."""
    model: ModelConfig
    worker: WorkerConfig
    """With this rank's share of threads, and the device of the whole group."""
    backend: Backend
    rendezvous: str
    """Path of the file where ranks find each other."""
    alive_s: float
    """Seconds between two signs of life."""
    log: LogConfig = LogConfig()

    @property
    def name(self) -> str:
        """This rank in words."""
        return f"rank {self.rank} of {self.size}"


def share_threads(total: int, size: int) -> tuple[int, ...]:
    """Shares compute threads out among ranks; each has one at least.

    Args:
        total: Threads of the whole worker.
        size: Ranks.

    Returns:
        Threads of each rank. What does not divide goes to the first ones, since rank 0
        samples as well.
    """
    each, left = divmod(total, size)
    return tuple(max(1, each + (rank < left)) for rank in range(size))


def follower_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns a worker's environment without the settings of the pool.

    Args:
        environ: The worker's own.
    """
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(PREFIX) or name.startswith(_KEPT)
    }


def orders(
    first: RankOrder, worker: WorkerConfig, threads: Sequence[int]
) -> list[RankOrder]:
    """Returns the order of every follower.

    Args:
        first: Of rank 1; the others differ in rank and threads alone.
        worker: Settings of the whole worker.
        threads: Of each rank, rank 0 included.
    """
    return [
        msgspec.structs.replace(
            first,
            rank=rank,
            worker=msgspec.structs.replace(worker, threads=threads[rank]),
        )
        for rank in range(1, first.size)
    ]
