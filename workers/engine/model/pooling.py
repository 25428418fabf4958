"""The KV pool of a model: what is asked of its size, and what memory allows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..kv.store import KVKind, KVStore
from .budget import MARGIN_BYTES, MARGIN_FRACTION, MIB, free_memory, pool_blocks
from .device import Target, place_store
from .families import family_of, kv_shape
from .headers import read_headers
from .lean_import import import_transformers
from .llama_fused import merged_layers
from .placing import members_of
from .sizes import mapped_bytes

if TYPE_CHECKING:
    from ..parallel.shard import Shard
    from .assembly import Checkpoint


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the KV pool's size."""

    block_size: int
    num_blocks: int | None
    kv_memory_mb: int
    apart_mb: int = 0
    """Of free memory, left for what comes after the pool."""


def weights_room(
    target: Target, path: Path, kv: KVKind, pool: PoolOptions, shard: Shard | None
) -> int | None:
    """Returns the bytes that weights may take on a GPU, or None on a host.

    The pool keeps what it was given in blocks, else at most a quarter of what is free.

    Args:
        target: Where the model computes.
        path: The checkpoint.
        kv: Precision of the pool.
        pool: What is asked of its size.
        shard: The rank whose part is loaded; None is the whole model.
    """
    if target.device.type == "cpu":
        return None
    free = free_memory(target.name).size
    room = free - max(MARGIN_BYTES, int(free * MARGIN_FRACTION)) - pool.apart_mb * MIB
    if pool.num_blocks is None:
        return room - min(pool.kv_memory_mb * MIB, room // 4)
    import_transformers()
    shape = kv_shape(family_of(path).load_config(path), shard)
    return room - pool.num_blocks * pool.block_size * shape.bytes_per_token(kv)


def make_pool(checkpoint: Checkpoint, kv: KVKind, pool: PoolOptions) -> KVStore:
    """Sizes and makes the KV pool; a GPU's has a block for padding rows.

    The ranks of a group agree on the number of blocks, since one plan is for all.

    Args:
        checkpoint: With its weights in memory.
        kv: Precision of the pool.
        pool: What is asked of its size.

    Raises:
        ModelLoadError: Not even one block fits.
    """
    target, communicator = checkpoint.options.target, checkpoint.options.communicator
    shape = kv_shape(checkpoint.config, checkpoint.options.shard)
    num_blocks = pool.num_blocks
    if num_blocks is None:
        on_host = target.device.type == "cpu"
        reserved, sharers = 0, 1
        if communicator is not None:
            # Once all have their weights, what is free is the pools' alone.
            communicator.numbers(0)
            sharers = communicator.size if on_host else 1
        elif on_host:
            headers = read_headers(checkpoint.path)
            layers = checkpoint.config.num_hidden_layers
            groups = merged_layers(layers) if checkpoint.merged else {}
            weights = checkpoint.options.weights
            reserved = mapped_bytes(headers, weights, members_of(groups))
        num_blocks = pool_blocks(
            shape,
            kind=kv,
            block_size=pool.block_size,
            kv_memory_mb=pool.kv_memory_mb,
            device=target.name,
            reserved=reserved + pool.apart_mb * MIB,
            sharers=sharers,
        )
    if communicator is not None:
        num_blocks = min(communicator.numbers(num_blocks))
    store = KVStore(
        shape,
        num_blocks=num_blocks + scratch_blocks(target),
        block_size=pool.block_size,
        kind=kv,
    )
    place_store(store, target)
    return store


def scratch_blocks(target: Target) -> int:
    """Returns how many blocks behind the pool no sequence may own."""
    return 1 if target.is_accelerator else 0
