"""Refuses a model that the host's memory cannot hold, before its weights are read.

A system out of memory kills processes, the worker's neighbours among them. A GPU needs
no such check: layers that do not fit it stay in host memory, or its allocator refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ....shared.errors import ModelLoadError
from .budget import (
    MARGIN_BYTES,
    MARGIN_FRACTION,
    MIB,
    FreeMemory,
    free_memory,
    part_of,
)
from .families import kv_shape
from .headers import read_headers
from .sizes import (
    PRECISIONS,
    count_parameters,
    mapped_bytes,
    precision_of,
    weight_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from transformers import PreTrainedConfig

    from ..kv.store import KVKind
    from .assembly import LoadOptions
    from .pooling import PoolOptions

_QUANTIZING: Final = 16
"""Bytes for a value of the largest tensor while it is quantized: two that are merged,
as floats of 32 bits, beside the floats that they were put together from."""


def check_room(
    path: Path,
    config: PreTrainedConfig,
    options: LoadOptions,
    kv: KVKind,
    pool: PoolOptions,
    copied: Collection[str] = (),
) -> None:
    """Compares what a model will take with what is free on this host.

    Float weights in the type of their files are mapped and may be larger than memory
    where the pool's blocks are given; a pool that is sized leaves room for them.

    Args:
        path: The checkpoint.
        config: Its configuration.
        options: Precision, device and rank.
        kv: Precision of the pool.
        pool: Its blocks, where they are given; else one has to fit.
        copied: Layers that are merged, so that their weights are no views of the file.

    Raises:
        ModelLoadError: It does not fit; says what is short and what would fit.
    """
    if options.target.device.type != "cpu":
        return
    ranks = 1 if options.shard is None else options.shard.size
    headers = read_headers(path)
    counts = count_parameters(headers, config)
    block = pool.block_size * kv_shape(config, options.shard).bytes_per_token(kv)
    free = _free(options)

    def need(name: str, count: int) -> _Need:
        size = weight_bytes(counts, name).total // ranks
        # A rank's parts are copies, whatever their type.
        mapped = 0 if options.shard else mapped_bytes(headers, name, copied)
        return _needed(size, mapped, count * block, free.size, pool)

    weights, blocks = precision_of(options.weights), pool.num_blocks or 1
    chosen = need(weights, blocks)
    short = chosen.total - free.size
    if short <= 0:
        return
    largest = max(one.size for one in headers.values()) // ranks
    ways = _fitting(need, weights, blocks, free.size, _QUANTIZING * largest)
    raise ModelLoadError(
        f"not enough memory for {path}: {chosen.told(weights, blocks, ranks)}, "
        f"{free.size // MIB} MiB are free{' for each' * (ranks > 1)} ({free.source}), "
        f"{-(-short // MIB)} MiB short; {_cure(ways)}"
    )


def _fitting(
    need: Callable[[str, int], _Need],
    weights: str,
    blocks: int,
    free: int,
    working: int,
) -> list[str]:
    """Returns what would fit instead, as a person would set it."""
    chosen = need(weights, blocks)
    others = ((name, need(name, blocks)) for name in PRECISIONS)
    ways = [
        f"weights='{name}' ({other.weights // MIB} MiB)"
        for name, other in others
        if other.weights < chosen.weights
        and max(other.total, other.weights + working) <= free
    ]
    if blocks > 1 and need(weights, 1).total <= free:
        ways.append("fewer worker.num_blocks")
    return ways


class _Need(msgspec.Struct, frozen=True):
    """Bytes that a model takes in one precision."""

    weights: int
    cache: int
    margin: int
    """And what is kept apart, where the pool is sized."""
    total: int

    def told(self, precision: str, blocks: int, ranks: int) -> str:
        """Returns what it is made of, for people."""
        margin = f", {self.margin // MIB} MiB of margin" if self.margin else ""
        return (
            f"{self.weights // MIB} MiB of {precision} weights{margin} and "
            f"{self.cache // MIB} MiB of KV in {blocks} block{'s' * (blocks > 1)}"
            f"{f' for each of {ranks} ranks' * (ranks > 1)}"
        )


def _needed(size: int, mapped: int, cache: int, free: int, pool: PoolOptions) -> _Need:
    """Returns what weights and KV take, by the rules that the pool is sized by."""
    copies = max(0, size - mapped)
    if pool.num_blocks is not None:
        return _Need(size, cache, 0, copies + cache)
    left = free - copies
    margin = max(MARGIN_BYTES, int(left * MARGIN_FRACTION)) + pool.apart_mb * MIB
    return _Need(size, cache, margin, size + cache + margin)


def _free(options: LoadOptions) -> FreeMemory:
    """Returns what is free for this process: of a group on one host, its part."""
    free = free_memory(options.target.name)
    if options.communicator is None:
        return free
    # No rank reads its weights before every rank has looked.
    least = min(options.communicator.numbers(free.size))
    return part_of(FreeMemory(least, free.source), options.communicator.size)


def _cure(ways: Sequence[str]) -> str:
    plan = "`tokenmill plan` says what it takes elsewhere"
    if not ways:
        return f"no precision fits here: free memory or take a smaller model; {plan}"
    return f"what would fit: {', '.join(ways)}; {plan}"
