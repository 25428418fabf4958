"""The KV pool's tensors: one block store per layer, sized once at load."""

from typing import Literal

import msgspec
import numpy as np
import torch

from ..kernels.layout import KVLayer

KVKind = Literal["int8", "float32"]

SCALE_BYTES = 4
"""One float32 scale beside each stored key and each stored value of a head."""


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the model dictates about its keys and values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, kind: KVKind) -> int:
        """Returns the pool bytes that one token of one sequence takes, all layers."""
        element = 1 if kind == "int8" else 4
        scale = SCALE_BYTES if kind == "int8" else 0
        per_head = self.head_dim * element + scale
        return 2 * self.num_layers * self.num_kv_heads * per_head


class KVStore:
    """Keys and values of every layer, in blocks that sequences share.

    Block ids mean the same block in every layer. Who owns which block is the block
    manager's business; here are only the bytes.

    Args:
        shape: Layers, heads and their size.
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        kind: "int8" (scales per token and head) or "float32".
    """

    def __init__(
        self, shape: KVShape, *, num_blocks: int, block_size: int, kind: KVKind
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kind = kind
        self.layers = tuple(self._layer() for _ in range(shape.num_layers))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        tokens = self.num_blocks * self.block_size
        return tokens * self.shape.bytes_per_token(self.kind)

    def _layer(self) -> KVLayer:
        heads = (self.num_blocks, self.shape.num_kv_heads, self.block_size)
        vectors = (*heads, self.shape.head_dim)
        if self.kind == "float32":
            return KVLayer(
                _zeros(vectors, np.float32), _zeros(vectors, np.float32), None, None
            )
        return KVLayer(
            _zeros(vectors, np.int8),
            _zeros(vectors, np.int8),
            _zeros(heads, np.float32),
            _zeros(heads, np.float32),
        )


def _zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> torch.Tensor:
    # numpy's zeros are untouched pages: a pool costs memory as it fills, not at load.
    return torch.from_numpy(np.zeros(shape, dtype=dtype))
