"""Refuses a model that the host's memory cannot hold, before its weights are read.

A system out of memory kills processes, the worker's neighbours among them. A GPU needs
no such check: layers that do not fit it stay in host memory, or its allocator refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ....shared.errors import ModelLoadError
from .budget import MIB, FreeMemory, free_memory, part_of
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
    from transformers import PreTrainedConfig

    from ..kv.store import KVKind
    from .assembly import Wish
    from .pooling import PoolWish


def check_room(
    path: Path, config: PreTrainedConfig, wish: Wish, kv: KVKind, pool: PoolWish
) -> None:
    """Compares what a model will take with what is free on this host.

    Float weights in the type of their files are mapped and may be larger than memory,
    as far as this goes: sizing the pool is what counts them.

    Args:
        path: The checkpoint.
        config: Its configuration.
        wish: Precision, device and rank.
        kv: Precision of the pool.
        pool: Its blocks, where they are given; else one has to fit.

    Raises:
        ModelLoadError: It does not fit; the message has the figures, what is short and
            the precisions that would fit.
    """
    if wish.target.device.type != "cpu":
        return
    ranks = 1 if wish.shard is None else wish.shard.size
    headers = read_headers(path)
    counts = count_parameters(headers, config)
    sizes = {name: weight_bytes(counts, name).total // ranks for name in PRECISIONS}
    blocks = pool.num_blocks or 1
    cache = blocks * pool.block_size * kv_shape(config, wish.shard).bytes_per_token(kv)
    weights = precision_of(wish.weights)
    # A rank's parts are copies, whatever their type.
    mapped = 0 if wish.shard else mapped_bytes(headers, weights)
    free = _free(wish)
    short = max(0, sizes[weights] - mapped) + cache - free.size
    if short <= 0:
        return
    fitting = [
        f"weights='{name}' ({size // MIB} MiB)"
        for name, size in sizes.items()
        if size < sizes[weights] and size + cache <= free.size
    ]
    raise ModelLoadError(
        f"not enough memory for {path}: {sizes[weights] // MIB} MiB of {weights} "
        f"weights and {cache // MIB} MiB of KV in {blocks} block{'s' * (blocks > 1)}"
        f"{f' for each of {ranks} ranks' * (ranks > 1)}, "
        f"{free.size // MIB} MiB are free{' for each' * (ranks > 1)} ({free.source}), "
        f"{-(-short // MIB)} MiB short; {_cure(fitting, pool)}"
    )


def _free(wish: Wish) -> FreeMemory:
    """Returns what is free for this process: of a group on one host, its part."""
    free = free_memory(wish.target.name)
    if wish.communicator is None:
        return free
    # No rank reads its weights before every rank has looked.
    least = min(wish.communicator.numbers(free.size))
    return part_of(FreeMemory(least, free.source), wish.communicator.size)


def _cure(fitting: list[str], pool: PoolWish) -> str:
    ways = [*fitting]
    if pool.num_blocks is not None:
        ways.append("fewer worker.num_blocks")
    plan = "`tokenmill plan` says what it takes elsewhere"
    if not ways:
        return f"no precision fits here: free memory or take a smaller model; {plan}"
    return f"what would fit: {', '.join(ways)}; {plan}"
