"""How large a KV pool fits into the memory that is free, and what was kept apart.

The pool is sized once, at start, when the weights are in memory:

    pool = min(kv_memory_mb, free - margin - weights that are not resident
               - adapters that the margin has no room for)

The margin is a tenth of what is free and 512 MiB at least. Activations, logits and the
Python heap live there.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import psutil
import structlog

from ....shared.errors import ModelLoadError

if TYPE_CHECKING:
    from ..kv.store import KVKind, KVShape

MIB: Final = 1024 * 1024
MARGIN_FRACTION: Final = 0.1
"""Share of free memory that the pool leaves alone."""
MARGIN_BYTES: Final = 512 * MIB
"""Least that the pool leaves."""
ADAPTERS_IN_MARGIN_MB: Final = 256
"""MiB of adapters for which the margin has room; more is kept apart from the pool."""
TYPICAL_TOKENS: Final = 512
"""Prompt and output of a typical request, for counting how many fit."""
_CGROUP = Path("/sys/fs/cgroup")
_log = structlog.get_logger("tokenmill.model")


class FreeMemory(msgspec.Struct, frozen=True):
    """What a process may still take, and who says so."""

    size: int
    """Bytes."""
    source: str
    """"host", "cgroup limit" or "cuda:<n>"."""


_share: float | None = None


def bound_memory(share: float | None) -> None:
    """Bounds what this process counts as free to a part of the whole.

    Processes that start side by side would each count the same free memory else.

    Args:
        share: Of the host's and of each device's memory, what the process has already
            included; None is no bound.
    """
    global _share
    _share = share


def memory_share() -> float | None:
    """Returns this process's part of the whole, or None."""
    return _share


def _within_share(free: FreeMemory, total: int, taken: int) -> FreeMemory:
    """Returns what is free of this process's share.

    Args:
        free: Of the whole.
        total: Bytes of the whole.
        taken: Bytes that this process has.
    """
    if _share is None:
        return free
    own = max(0, int(total * _share) - taken)
    if own >= free.size:
        return free
    return FreeMemory(own, f"share {_share:g} of {free.source}")


def free_memory(device: str = "cpu") -> FreeMemory:
    """Returns what this process may still take of a device's memory.

    Args:
        device: "cpu" is the host within its cgroup; else a CUDA device.

    Raises:
        ModelLoadError: There is no such device.
    """
    if device != "cpu":
        return _free_on_cuda(device)
    total = int(psutil.virtual_memory().total)
    info = psutil.Process().memory_info()
    # Pages of mapped weights are counted apart (`reserved`).
    taken = int(info.rss) - int(getattr(info, "shared", 0))
    return _within_share(*_free_on_host(total), taken)


def part_of(free: FreeMemory, sharers: int) -> FreeMemory:
    """Returns what one of several processes may take of the memory that is free to all.

    Args:
        free: As each of them has found it.
        sharers: How many take equal parts.
    """
    # A share of the whole is each process's own already.
    return FreeMemory(free.size // (1 if _share else sharers), free.source)


def _free_on_host(total: int) -> tuple[FreeMemory, int]:
    """Returns what is free, and the whole that it is free of."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        statistics = (_CGROUP / "memory.stat").read_text()
    except (OSError, ValueError):
        # No cgroup v2 here, or its limit is "max".
        return FreeMemory(available, "host"), total
    cached = 0
    for line in statistics.splitlines():
        if line.startswith("inactive_file "):
            cached = int(line.split()[1])  # given back under pressure
    within = limit - used + cached
    whole = min(total, limit)
    if within < available:
        return FreeMemory(within, "cgroup limit"), whole
    return FreeMemory(available, "host"), whole


def _free_on_cuda(device: str) -> FreeMemory:
    import torch

    if not torch.cuda.is_available():
        raise ModelLoadError(
            f"no CUDA device is here to ask how much of {device} is free; use the CPU, "
            "or tell inspect the device's memory with --memory-gb"
        )
    free, total = torch.cuda.mem_get_info(device)
    # What torch's allocator keeps unused is ours to use, though not free to others.
    taken = int(torch.cuda.memory_allocated(device))
    kept = int(torch.cuda.memory_reserved(device)) - taken
    found = FreeMemory(int(free) + kept, str(torch.device(device)))
    return _within_share(found, int(total), taken)


def trim_heap() -> None:
    """Gives the system back what the C library's heap holds and nobody uses.

    Quantizing frees tens of MiB in pieces, which would stay with the process and be
    missing from the pool. Does nothing where the library has no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PoolBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that a pool follows from; bytes unless said otherwise."""

    free: FreeMemory
    margin: int
    """Of free memory, never given to the pool."""
    reserved: int
    """Weights, and adapters beyond the margin, that are still counted as free."""
    limit: int | None
    """`kv_memory_mb` as bytes; None is no bound but memory."""
    block_bytes: int
    block_size: int
    """Tokens."""

    @property
    def room(self) -> int:
        """Bytes that the pool may take."""
        room = self.free.size - self.margin - self.reserved
        return max(0, room if self.limit is None else min(self.limit, room))

    @property
    def blocks(self) -> int:
        """Blocks that fit."""
        return self.room // self.block_bytes

    def sequences(self, tokens: int) -> int:
        """Returns how many sequences of that many tokens fit at once."""
        return self.blocks // -(-tokens // self.block_size)


def pool_budget(
    shape: KVShape,
    *,
    kind: KVKind,
    block_size: int,
    kv_memory_mb: int | None,
    device: str = "cpu",
    reserved: int = 0,
    free: FreeMemory | None = None,
) -> PoolBudget:
    """Returns what a pool is sized from; see `pool_blocks`.

    Args:
        shape: The model's keys and values.
        kind: Precision of the pool.
        block_size: Tokens per block.
        kv_memory_mb: Upper bound in MiB, or None.
        device: "cpu" or a CUDA device.
        reserved: Bytes of weights and adapters that are still counted as free.
        free: What is free; None asks the device.
    """
    free = free or free_memory(device)
    return PoolBudget(
        free=free,
        margin=max(MARGIN_BYTES, int(free.size * MARGIN_FRACTION)),
        reserved=reserved,
        limit=None if kv_memory_mb is None else kv_memory_mb * MIB,
        block_bytes=shape.bytes_per_token(kind) * block_size,
        block_size=block_size,
    )


def pool_blocks(
    shape: KVShape,
    *,
    kind: KVKind,
    block_size: int,
    kv_memory_mb: int | None,
    device: str = "cpu",
    reserved: int = 0,
    sharers: int = 1,
) -> int:
    """Returns how many KV blocks fit now, and logs what they were sized from.

    Args:
        shape: The model's keys and values.
        kind: Precision of the pool.
        block_size: Tokens per block.
        kv_memory_mb: Upper bound of the pool in MiB; None is no bound but memory.
        device: Where the pool will be: "cpu" or a CUDA device.
        reserved: Bytes of weights and adapters still to be loaded there, or mapped
            from files, whose pages count as free (`sizes.mapped_bytes`).
        sharers: Processes that take equal parts of what is free there.

    Raises:
        ModelLoadError: Not even one block fits.
    """
    budget = pool_budget(
        shape,
        kind=kind,
        block_size=block_size,
        kv_memory_mb=kv_memory_mb,
        device=device,
        reserved=reserved,
        free=part_of(free_memory(device), sharers),
    )
    if budget.blocks < 1:
        raise ModelLoadError(_no_block(budget, kv_memory_mb))
    _log_size(budget, kv_memory_mb)
    return budget.blocks


def _no_block(budget: PoolBudget, limit_mib: int | None) -> str:
    """Says why not one block fits, what is short, and what would work."""
    free = budget.free
    needed = budget.block_bytes + budget.margin + budget.reserved
    short = needed - free.size
    figures = (
        f"no KV block of {budget.block_bytes} bytes fits: {free.size // MIB} MiB are "
        f"free ({free.source}), {budget.margin // MIB} MiB are kept as a margin, "
        f"{budget.reserved // MIB} MiB for weights and adapters, and kv_memory_mb is "
        f"{limit_mib}"
    )
    if short <= 0:
        least = -(-budget.block_bytes // MIB)
        return f"{figures}; raise kv_memory_mb to {least} at least"
    return (
        f"{figures}; {-(-short // MIB)} MiB short: free as much, use a smaller "
        "precision of the weights (weights='int8') or set worker.num_blocks; "
        "`tokenmill plan` says what the model takes elsewhere"
    )


def _log_size(budget: PoolBudget, limit_mib: int | None) -> None:
    _log.info(
        "kv_pool_sized",
        free_mib=budget.free.size // MIB,
        free_by=budget.free.source,
        margin_mib=budget.margin // MIB,
        weights_mib=budget.reserved // MIB,
        limit_mib=limit_mib,
        pool_mib=budget.blocks * budget.block_bytes // MIB,
        blocks=budget.blocks,
        tokens=budget.blocks * budget.block_size,
        typical_tokens=TYPICAL_TOKENS,
        typical_sequences=budget.sequences(TYPICAL_TOKENS),
    )
