"""What ranks of one group say to each other while a step runs, and between steps.

Sums are made in the order of the ranks, whatever the tensor's size: a library's ring or
tree chooses the order by an element's place in the buffer, so that a request's last
bits would depend on its batch. Every rank ends up with the same bits.

Two groups of processes stand behind it. What a step computes goes through one with a
short time-out. Plans go through one of Gloo that waits as long as it takes, since
between requests there is nothing to say; a rank that died is noticed in both at once.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog
import torch
from torch._C._distributed_c10d import PrefixStore

from ....shared.errors import GroupLost
from .groups import (
    Group,
    Transport,
    first_line,
    gloo_backend,
    nccl_backend,
    open_store,
)
from .shard import Shard

TIMEOUT_S: Final = 10.0
"""For one exchange of a step; far more than any takes between living ranks."""
CONNECT_TIMEOUT_S: Final = 60.0
"""For all ranks to find each other."""
ONE_ROUND_BYTES: Final = 64 * 1024
"""Up to this size a sum costs its round trips, not its bytes."""
FRAME_BYTES: Final = 8192
"""A plan's first part, in which most fit whole."""
_LENGTH_BYTES: Final = 8
_FOREVER: Final = dt.timedelta(days=365)
log = structlog.get_logger("tokenmill.parallel")


class Traffic:
    """Exchanges of one kind: how many, and the bytes that this rank sent in them."""

    __slots__ = ("bytes", "calls")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0

    def add(self, sent: int) -> None:
        """Counts one call."""
        self.calls += 1
        self.bytes += sent


class Communicator:
    """One rank's end of a group; `connect_group` makes it.

    Args:
        shard: Which rank.
        control: Carries plans, and numbers to agree on; waits without end.
        data: Carries the tensors of a step.
    """

    def __init__(self, shard: Shard, control: Group, data: Group) -> None:
        self.shard = shard
        self.counts: Mapping[str, Traffic] = {
            kind: Traffic() for kind in ("all_reduce", "gather", "broadcast", "numbers")
        }
        """By kind of exchange."""
        self._control = control
        self._data = data
        self._frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)

    @property
    def rank(self) -> int:
        """This rank, from 0; 0 leads."""
        return self.shard.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.shard.size

    # --- within a step ------------------------------------------------------------
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up a tensor over all ranks, in the order of the ranks.

        Half precision is summed in float32 and rounded once.

        Args:
            x: Of the same shape on every rank; changed in place if it is contiguous.

        Returns:
            The sum, the same bits on every rank.

        Raises:
            GroupLost: A rank is gone or did not answer in time.
        """
        flat = x.reshape(-1)
        count, size = flat.numel(), self.size
        if count == 0 or size == 1:
            return x
        if size == 2 or flat.nbytes <= ONE_ROUND_BYTES:
            parts = self._data.all_gather(flat)
            _add_in_order(parts.view(size, count), flat)
            self.counts["all_reduce"].add((size - 1) * flat.nbytes)
            return flat.view(x.shape)
        # Each rank adds up one piece and hands it round: one round more, fewer bytes.
        piece = -(-count // size)
        padded = torch.nn.functional.pad(flat, (0, piece * size - count))
        pieces = self._data.all_to_all(padded)
        own = flat.new_empty(piece)
        _add_in_order(pieces.view(size, piece), own)
        flat.copy_(self._data.all_gather(own)[:count])
        self.counts["all_reduce"].add(2 * (size - 1) * own.nbytes)
        return flat.view(x.shape)

    def gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor | None:
        """Puts the ranks' columns side by side on rank 0.

        Args:
            x: [rows, widths[rank]].
            widths: Columns of each rank.

        Returns:
            [rows, sum of widths] on rank 0, None on others.

        Raises:
            GroupLost: A rank is gone or did not answer in time.
        """
        missing = max(widths) - x.shape[-1]
        mine = torch.nn.functional.pad(x, (0, missing)) if missing else x.contiguous()
        parts = self._data.gather(mine)
        self.counts["gather"].add(mine.nbytes if self.rank else 0)
        if not parts:
            return None
        return torch.cat(
            [part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=-1
        )

    # --- between steps ------------------------------------------------------------
    def broadcast_bytes(self, data: bytes | None = None) -> bytes:
        """Hands bytes of rank 0 to all; other ranks wait for them without end.

        Args:
            data: On rank 0 what to say, None on others.

        Returns:
            What rank 0 said.

        Raises:
            GroupLost: A rank is gone.
        """
        frame, room = self._frame, FRAME_BYTES - _LENGTH_BYTES
        if data is not None:
            head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
            frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._broadcast(frame)
        received = frame.numpy().tobytes()
        length = int.from_bytes(received[:_LENGTH_BYTES], "little")
        first = received[_LENGTH_BYTES : _LENGTH_BYTES + min(length, room)]
        if length <= room:
            return first
        rest = (
            torch.empty(length - room, dtype=torch.uint8)
            if data is None
            else torch.frombuffer(bytearray(data[room:]), dtype=torch.uint8)
        )
        self._broadcast(rest)
        return first + rest.numpy().tobytes()

    def numbers(self, own: int) -> tuple[int, ...]:
        """Returns every rank's number, in the order of ranks, once all are named.

        It waits without end: ranks may take very different times to load.

        Args:
            own: This rank's, of 63 bits at most.

        Raises:
            GroupLost: A rank is gone.
        """
        every = self._control.all_gather(torch.tensor([own], dtype=torch.int64))
        self.counts["numbers"].add((self.size - 1) * 8)
        return tuple(every.tolist())

    def close(self) -> None:
        """Leaves the group: ranks that still wait for this one are told at once."""
        self._control.close()
        self._data.close()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._control.broadcast(tensor)
        # However it is passed on, the leader answers for what all others got.
        self.counts["broadcast"].add((self.size - 1) * tensor.nbytes * (not self.rank))


def connect_group(
    shard: Shard,
    rendezvous: Path | str,
    backend: Transport = "gloo",
    timeout_s: float = TIMEOUT_S,
    *,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> Communicator:
    """Joins a group; returns when all of its ranks have.

    Args:
        shard: Which rank of how many.
        rendezvous: A file that no other group uses or has used.
        backend: "nccl" for a GPU of each rank's own (the current CUDA device), else
            "gloo".
        timeout_s: For an exchange within a step.
        connect_timeout_s: For all ranks to come.

    Raises:
        GroupLost: Not all ranks came in time.
        ModelLoadError: This build of torch has no such backend.
    """
    patience = dt.timedelta(seconds=connect_timeout_s)
    limit = dt.timedelta(seconds=timeout_s)
    try:
        store = open_store(shard, rendezvous, patience)
        control = gloo_backend(PrefixStore("control", store), shard, patience)
        own = PrefixStore("data", store)
        if backend == "nccl":
            data = nccl_backend(own, shard, limit)
        else:
            data = gloo_backend(own, shard, patience)
    except RuntimeError as error:
        raise GroupLost(
            f"rank {shard.rank} did not find the other {shard.size - 1} within "
            f"{connect_timeout_s:g} s ({first_line(error)}); see why they failed"
        ) from error
    log.info(
        "group_connected",
        rank=shard.rank,
        size=shard.size,
        backend=backend,
        timeout_s=timeout_s,
    )
    return Communicator(
        shard,
        Group(shard, control, _FOREVER, "plans"),
        Group(shard, data, limit, "tensors"),
    )


def _add_in_order(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Adds up [ranks, n] row by row into [n]: the same order for every element."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    out.copy_(total)
