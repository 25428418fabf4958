"""Paged attention over packed queries: sizes, and the launches of its kernels.

Every kernel is launched for the whole step and skips the sequences of the other kind:
decode is one query, prefill several.
"""

from dataclasses import dataclass

import torch
import triton

from ..layout import KVLayer, StepLayout
from .decode import decode_kernel, reduce_kernel
from .layout import STORED_BITS, to_device
from .prefill import prefill_kernel


@dataclass(frozen=True)
class Tiling:
    """Sizes of the kernels' tiles. Part of the numerics: keep one for a model's life.

    Decode and prefill use the same number of rows, so that both reduce a row in the
    same order on the device.
    """

    rows: int = 32
    """Rows of a tile (queries times the heads of a group), a power of two >= 16."""
    keys: int = 32
    """Keys of a tile, a power of two >= 16."""
    split: int = 512
    """Keys of a split, a multiple of `keys`."""


def paged_attention(
    q: torch.Tensor,
    store_layer: KVLayer,
    layout: StepLayout,
    *,
    scale: float,
    window: int | None = None,
    alibi: torch.Tensor | None = None,
    softcap: float | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Causal attention of packed queries over what the blocks hold.

    Args:
        q: [tokens, num_heads, head_dim], float32 or half precision.
        store_layer: The blocks of this layer, this step's tokens already written.
        layout: Gives each query its sequence, position and blocks.
        scale: Factor on the dot products.
        window: Keys a query sees at most, its own included; None for all.
        alibi: float32 [num_heads, positions], or None.
        softcap: Bound of the scores through tanh, or None.
        tiling: Tile sizes; the default suits every model.

    Returns:
        [tokens, num_heads, head_dim] in the type of `q`.
    """
    q = q.contiguous()
    out = torch.empty_like(q)
    if q.shape[0] == 0:
        return out
    launch = _Launch(q, out, store_layer, layout, tiling or Tiling())
    options = {
        "scale": scale,
        "window": 0 if window is None else window,
        "softcap": 1.0 if softcap is None else softcap,
        "alibi_ptr": q if alibi is None else alibi,
        "alibi_stride": 0 if alibi is None else alibi.stride(0),
        "WINDOW": window is not None,
        "ALIBI": alibi is not None,
        "SOFTCAP": softcap is not None,
    }
    launch.decode(options)
    if launch.layout.max_query > 1:
        launch.prefill(options)
    return out


class _Launch:
    """One call's tensors and sizes, for the kernels that share them."""

    def __init__(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        store_layer: KVLayer,
        layout: StepLayout,
        tiling: Tiling,
    ) -> None:
        layer, layout = store_layer, to_device(layout, q.device)
        self.q, self.out, self.layout, self.tiling = q, out, layout, tiling
        self.tokens, self.heads, self.head_dim = q.shape
        _, self.kv_heads, block_size, _ = layer.k.shape
        self.group = self.heads // self.kv_heads
        self.sequences = layout.context_length.shape[0]
        self.rows = max(tiling.rows, triton.next_power_of_2(self.group))
        self.splits = triton.cdiv(layout.max_context, tiling.split)
        bits = STORED_BITS[layer.kind]
        quantized = layer.k_scale is not None
        self.common: dict[str, object] = {
            "q_ptr": q,
            "k_ptr": layer.k,
            "v_ptr": layer.v,
            "k_scale_ptr": layer.k_scale if quantized else q,
            "v_scale_ptr": layer.v_scale if quantized else q,
            "query_start_ptr": layout.query_start,
            "context_ptr": layout.context_length,
            "table_ptr": layout.block_table,
            "q_stride": q.stride(0),
            "table_stride": layout.block_table.stride(0),
            "GROUP": self.group,
            "SPLIT": tiling.split,
            "ROWS": self.rows,
            "TILE": tiling.keys,
            "D": self.head_dim,
            "D_PADDED": max(16, triton.next_power_of_2(self.head_dim)),
            "KV_HEADS": self.kv_heads,
            "BLOCK_SIZE": block_size,
            "BITS": bits,
            # tf32 holds INT8 and half precision exactly, but not float32 queries.
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
            # Fused multiply-adds would be placed differently in the two kernels.
            "enable_fp_fusion": False,
            "num_warps": 4,
        }

    def decode(self, options: dict[str, object]) -> None:
        """Sequences with one query: all splits at once, then their reduction."""
        states = (self.sequences, self.heads, self.splits)
        total = torch.empty(states, dtype=torch.float32, device=self.q.device)
        peak = torch.empty_like(total)
        acc = total.new_empty((*states, self.head_dim))
        decode_kernel[(self.sequences, self.kv_heads, self.splits)](
            acc_ptr=acc,
            total_ptr=total,
            peak_ptr=peak,
            num_splits=self.splits,
            **self.common,
            **options,
        )
        reduce_kernel[(self.sequences, self.heads)](
            self.out,
            acc,
            total,
            peak,
            self.layout.query_start,
            self.layout.context_length,
            self.out.stride(0),
            options["window"],
            self.splits,
            SPLIT=self.tiling.split,
            HEADS=self.heads,
            D=self.head_dim,
            D_PADDED=self.common["D_PADDED"],
            WINDOW=options["WINDOW"],
            enable_fp_fusion=False,
        )

    def prefill(self, options: dict[str, object]) -> None:
        """Sequences with several queries: a tile of them at a time."""
        queries = self.rows // self.group
        tiles = self.tokens // queries + self.sequences
        prefill_kernel[(tiles, self.kv_heads)](
            out_ptr=self.out,
            out_stride=self.out.stride(0),
            num_sequences=self.sequences,
            QUERIES=queries,
            SEQUENCES_PADDED=triton.next_power_of_2(self.sequences),
            **self.common,
            **options,
        )
