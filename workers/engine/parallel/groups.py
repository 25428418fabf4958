"""torch.distributed's groups of processes, each made by itself and none of them global.

A process may so be in several groups and a host have many of them. Only what runs split
over ranks imports this.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, Protocol, cast

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    FileStore,
    GatherOptions,
    Store,
    Work,
)

from ....shared.errors import GroupLost, ModelLoadError
from .shard import Shard

Transport = Literal["gloo", "nccl"]
"""What carries a step's tensors: Gloo between CPUs, NCCL between GPUs."""
LOOPBACK: Final = "127.0.0.1"
"""A group's ranks share a host; its own name may not resolve inside a container."""


class Backend(Protocol):
    """What is called of torch's process groups; each returns before it is done."""

    def _allgather_base(
        self, out: torch.Tensor, x: torch.Tensor, options: AllgatherOptions
    ) -> Work: ...

    def alltoall_base(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_sizes: list[int],
        sizes: list[int],
        options: AllToAllOptions,
    ) -> Work:
        """Sends each rank a piece; no sizes are equal ones."""
        ...

    def gather(
        self,
        out: list[list[torch.Tensor]],
        x: list[torch.Tensor],
        options: GatherOptions,
    ) -> Work:
        """Sends a tensor to the root."""
        ...

    def broadcast(self, x: list[torch.Tensor], options: BroadcastOptions) -> Work:
        """Sends the root's tensor to all."""
        ...


class Group:
    """One rank's end of a group, whose exchanges come to an end or raise.

    Args:
        shard: Which rank.
        backend: torch's.
        limit: Of one exchange.
        name: For messages.
    """

    def __init__(
        self, shard: Shard, backend: Backend, limit: dt.timedelta, name: str
    ) -> None:
        self._shard = shard
        self._backend: Backend | None = backend
        self._limit = limit
        self._name = name
        self._gather_all = AllgatherOptions()
        self._swap = AllToAllOptions()
        self._gather = GatherOptions()
        self._broadcast = BroadcastOptions()
        for options in (self._gather_all, self._swap, self._gather, self._broadcast):
            options.timeout = limit
        self._gather.rootRank = 0
        self._broadcast.rootRank = self._broadcast.rootTensor = 0

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns every rank's [n], in the order of ranks: [ranks * n]."""
        parts = x.new_empty(self._shard.size * x.numel())
        self._finish(
            lambda backend: backend._allgather_base(  # noqa: SLF001  (no other name)
                parts, x, self._gather_all
            )
        )
        return parts

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Sends each rank its piece of [ranks * n]; returns what came, alike."""
        parts = torch.empty_like(x)
        self._finish(
            lambda backend: backend.alltoall_base(parts, x, [], [], self._swap)
        )
        return parts

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's tensor on rank 0, nothing on others."""
        is_root = self._shard.rank == 0
        parts = [torch.empty_like(x) for _ in range(self._shard.size * is_root)]
        self._finish(
            lambda backend: backend.gather(
                [parts] if is_root else [], [x], self._gather
            )
        )
        return parts

    def broadcast(self, x: torch.Tensor) -> None:
        """Writes rank 0's tensor into that of every rank."""
        self._finish(lambda backend: backend.broadcast([x], self._broadcast))

    def close(self) -> None:
        """Leaves: ranks that still wait for this one are told at once."""
        self._backend = None

    def _finish(self, begin: Callable[[Backend], Work]) -> None:
        rank, size = self._shard.rank, self._shard.size
        if self._backend is None:
            raise GroupLost(f"rank {rank} of {size} has left its group; start it again")
        try:
            begin(self._backend).wait()
        except RuntimeError as error:
            # The others may be in the midst of another exchange: nothing fits any more.
            self.close()
            raise GroupLost(
                f"rank {rank} of {size}: another rank is dead, or did not answer "
                f"within {self._limit.total_seconds():g} s ({self._name}: "
                f"{first_line(error)}); the whole group has to be started again"
            ) from error


def open_store(shard: Shard, rendezvous: Path | str, patience: dt.timedelta) -> Store:
    """Returns where ranks find each other.

    Args:
        shard: Which rank.
        rendezvous: A file of this group alone.
        patience: How long it waits for others.
    """
    store = FileStore(str(rendezvous), shard.size)
    store.set_timeout(patience)
    return store


def gloo_backend(store: Store, shard: Shard, patience: dt.timedelta) -> Backend:
    """Connects a group of Gloo over this host's loopback.

    Args:
        store: Of this group alone.
        shard: Which rank.
        patience: How long it waits for others.

    Raises:
        ModelLoadError: This build of torch has no Gloo.
    """
    try:
        from torch._C._distributed_c10d import ProcessGroupGloo
    except ImportError as error:
        raise _missing("gloo", error) from error
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices = [  # noqa: SLF001
        ProcessGroupGloo.create_device(hostname=LOOPBACK)
    ]
    options._timeout = patience  # noqa: SLF001
    options._threads = 1  # noqa: SLF001  (exchanges come one at a time)
    return cast("Backend", ProcessGroupGloo(store, shard.rank, shard.size, options))


def nccl_backend(store: Store, shard: Shard, limit: dt.timedelta) -> Backend:
    """Connects a group of NCCL between the ranks' current CUDA devices.

    Args:
        store: Of this group alone.
        shard: Which rank.
        limit: Of one exchange; NCCL's watchdog ends the process after it.

    Raises:
        ModelLoadError: This build of torch has no NCCL.
    """
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL
    except ImportError as error:
        raise _missing("nccl", error) from error
    options = ProcessGroupNCCL.Options()
    options._timeout = limit  # noqa: SLF001
    return cast("Backend", ProcessGroupNCCL(store, shard.rank, shard.size, options))


def first_line(error: BaseException) -> str:
    """Returns an error's message without the stack that torch puts behind it."""
    return str(error).partition("\n")[0] or type(error).__name__


def _missing(backend: str, error: ImportError) -> ModelLoadError:
    return ModelLoadError(
        f"torch {torch.__version__} was built without {backend} ({error}); tensor "
        "parallelism needs it: install another build of torch, or use tp=1"
    )
