"""What the kernels read besides activations: a step's layout and a layer's KV store."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import torch

from ....shared.errors import EngineError

if TYPE_CHECKING:
    from ..batch import StepBatch

KVKind = Literal["int8", "int4", "float32"]
"""How keys and values are stored."""
INT4_GROUP: Final = 16
"""Neighbouring elements of a head that share one scale of an INT4 store."""


def check_head_dim(head_dim: int, kind: KVKind) -> None:
    """Refuses a head size that a store of this kind cannot hold.

    Args:
        head_dim: Elements per head.
        kind: Of the store.

    Raises:
        EngineError: INT4 packs two elements a byte, and this size is odd.
    """
    if kind == "int4" and head_dim % 2:
        raise EngineError(
            f"kv='int4' needs an even head size and this model has {head_dim}; "
            "use kv='int8'"
        )


def int4_groups(head_dim: int) -> int:
    """Returns the scales per vector of an INT4 store; the last group may be short."""
    return -(-head_dim // INT4_GROUP)


@dataclass(frozen=True, slots=True)
class KVLayer:
    """K and V of one layer, in blocks: float32, or INT8 or INT4 with scales.

    An INT4 byte holds element 2j in its low and 2j + 1 in its high half, each as
    q + 8 in 0..15; see `reference.kv_quantize_int4`.
    """

    k: torch.Tensor
    """[num_blocks, num_kv_heads, block_size, n]: float32 or int8 with n = head_dim,
    uint8 with n = head_dim / 2 for an INT4 store."""
    v: torch.Tensor
    """Same shape and dtype as `k`."""
    k_scale: torch.Tensor | None
    """INT8: float32 [num_blocks, num_kv_heads, block_size]. INT4: bfloat16
    [num_blocks, num_kv_heads, block_size, groups]. None for a float32 store."""
    v_scale: torch.Tensor | None
    """Same as `k_scale`, for V."""

    @property
    def kind(self) -> KVKind:
        """How the store holds its elements."""
        if self.k.dtype == torch.uint8:
            return "int4"
        return "int8" if self.k.dtype == torch.int8 else "float32"

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self.k.shape[3] * (2 if self.k.dtype == torch.uint8 else 1)

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        kind: KVKind,
    ) -> "KVLayer":
        """Returns a zeroed store for one layer.

        Args:
            num_blocks: Blocks in the pool.
            num_kv_heads: KV heads of this layer (of this rank).
            block_size: Tokens per block.
            head_dim: Elements per head; even for INT4.
            kind: "int8" (a scale per token and head), "int4" (one per 16 elements
                of it) or "float32".

        Raises:
            EngineError: An INT4 store of an odd head size.
        """
        check_head_dim(head_dim, kind)
        slots = (num_blocks, num_kv_heads, block_size)
        if kind == "float32":
            return cls(
                _zeros((*slots, head_dim), np.float32),
                _zeros((*slots, head_dim), np.float32),
                None,
                None,
            )
        if kind == "int8":
            return cls(
                _zeros((*slots, head_dim), np.int8),
                _zeros((*slots, head_dim), np.int8),
                _zeros(slots, np.float32),
                _zeros(slots, np.float32),
            )
        scales = (*slots, int4_groups(head_dim))
        return cls(
            _zeros((*slots, head_dim // 2), np.uint8),
            _zeros((*slots, head_dim // 2), np.uint8),
            _zeros(scales, np.int16).view(torch.bfloat16),
            _zeros(scales, np.int16).view(torch.bfloat16),
        )


def _zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> torch.Tensor:
    # numpy's zeros are untouched pages: a pool costs memory as it fills, not at load.
    return torch.from_numpy(np.zeros(shape, dtype=dtype))


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the tokens of one packed step live. Built once per step."""

    slot_mapping: torch.Tensor
    """int64 [tokens]: block * block_size + offset, where each token's K and V go."""
    query_start: torch.Tensor
    """int32 [seqs + 1]: the packed range of each sequence."""
    context_length: torch.Tensor
    """int32 [seqs]: tokens with K and V once this step has written its own."""
    block_table: torch.Tensor
    """int32 [seqs, max_blocks], rows padded with 0."""
    positions: torch.Tensor
    """int64 [tokens]: position of each token in its own sequence."""

    @classmethod
    def from_batch(cls, batch: "StepBatch", block_size: int) -> "StepLayout":
        """Builds the layout of a packed batch.

        Args:
            batch: Packed tokens with their slices.
            block_size: Tokens per KV block.

        Returns:
            The layout; it shares the memory of `batch.positions`.
        """
        slices = batch.slices
        lengths = np.array([s.query_length for s in slices], dtype=np.int32)
        context = np.array([s.context_length for s in slices], dtype=np.int32)
        starts = np.zeros(len(slices) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        table = np.zeros(
            (len(slices), max((len(s.block_table) for s in slices), default=1)),
            dtype=np.int32,
        )
        for row, piece in enumerate(slices):
            table[row, : len(piece.block_table)] = piece.block_table
        sequence = np.repeat(np.arange(len(slices)), lengths)
        # Index in the KV store: the same as the position, but never beyond the table.
        index = (
            np.arange(int(starts[-1]), dtype=np.int64)
            - starts[:-1][sequence]
            + (context - lengths)[sequence]
        )
        blocks = table[sequence, index // block_size].astype(np.int64)
        return cls(
            torch.from_numpy(blocks * block_size + index % block_size),
            torch.from_numpy(starts),
            torch.from_numpy(context),
            torch.from_numpy(table),
            torch.from_numpy(np.ascontiguousarray(batch.positions, dtype=np.int64)),
        )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear layer's INT8 weight as one backend's kernels read it."""

    data: torch.Tensor
    """int8; the arrangement belongs to `backend`."""
    scale: torch.Tensor
    """float32 [rounded-up N]: one symmetric scale per output channel."""
    out_features: int
    in_features: int
    activations: str
    """"int16" or "int8": how each input row is quantized."""
    backend: str
    """Name of the backend that packed it: "reference", "numba" or "cpp"."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weight takes."""
        return self.data.nbytes + self.scale.nbytes
