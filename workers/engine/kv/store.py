"""The KV pool's tensors: one block store per layer, sized once at load."""

import msgspec

from ..kernels.layout import KVKind as KVKind
from ..kernels.layout import KVLayer, check_head_dim, int4_groups

SCALE_BYTES = {"int8": 4, "int4": 2, "float32": 0}
"""Per scale: float32 for a vector of INT8, bfloat16 for 16 elements of INT4."""


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the model dictates about its keys and values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, kind: KVKind) -> int:
        """Returns the pool bytes that one token of one sequence takes, all layers."""
        elements = {
            "int8": self.head_dim,
            "int4": -(-self.head_dim // 2),
            "float32": 4 * self.head_dim,
        }
        scales = int4_groups(self.head_dim) if kind == "int4" else 1
        per_head = elements[kind] + scales * SCALE_BYTES[kind]
        return 2 * self.num_layers * self.num_kv_heads * per_head


class KVStore:
    """Keys and values of every layer, in blocks that sequences share.

    Block ids mean the same block in every layer. Who owns which block is the block
    manager's business; here are only the bytes.

    Args:
        shape: Layers, heads and their size.
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        kind: "int8" (a scale per token and head), "int4" (one per 16 elements of
            it) or "float32".

    Raises:
        EngineError: The kind cannot hold heads of this size.
    """

    def __init__(
        self, shape: KVShape, *, num_blocks: int, block_size: int, kind: KVKind
    ) -> None:
        check_head_dim(shape.head_dim, kind)
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
        return KVLayer.allocate(
            self.num_blocks,
            self.shape.num_kv_heads,
            self.block_size,
            self.shape.head_dim,
            kind=self.kind,
        )
