"""What the kernels read besides activations: a step's layout and a layer's KV store."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ..batch import StepBatch


@dataclass(frozen=True, slots=True)
class KVLayer:
    """K and V of one layer, in blocks. INT8 with scales, or float32 without."""

    k: torch.Tensor
    """int8 or float32 [num_blocks, num_kv_heads, block_size, head_dim]."""
    v: torch.Tensor
    """Same shape and dtype as `k`."""
    k_scale: torch.Tensor | None
    """float32 [num_blocks, num_kv_heads, block_size]; None for a float32 store."""
    v_scale: torch.Tensor | None
    """Same as `k_scale`, for V."""

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        int8: bool,
    ) -> "KVLayer":
        """Returns a zeroed store for one layer.

        Args:
            num_blocks: Blocks in the pool.
            num_kv_heads: KV heads of this layer (of this rank).
            block_size: Tokens per block.
            head_dim: Elements per head.
            int8: True for INT8 with a scale per token and head, False for float32.
        """
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        dtype = torch.int8 if int8 else torch.float32
        scales = (
            [torch.zeros(shape[:3]), torch.zeros(shape[:3])] if int8 else [None, None]
        )
        return cls(
            torch.zeros(shape, dtype=dtype),
            torch.zeros(shape, dtype=dtype),
            scales[0],
            scales[1],
        )


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
