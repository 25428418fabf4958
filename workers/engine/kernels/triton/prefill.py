"""Prefill: tiles of packed queries, each over its own sequence's context."""
# Triton reads parameters that a type checker has no types for.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl

from .softmax import attend_split, load_queries, merge


# fmt: off
@triton.jit
def _find_tile(query_start_ptr, num_sequences, tile, QUERIES: tl.constexpr,
               SEQUENCES_PADDED: tl.constexpr):
    """The sequence that owns a tile of queries, and the tile's index within it.

    Sequence i is given the tiles from query_start[i] // QUERIES + i on: enough for
    its length, and rising with i, so that counting finds the owner. Spare tiles at
    its end have no queries.
    """
    index = tl.arange(0, SEQUENCES_PADDED)
    starts = tl.load(query_start_ptr + index, mask=index < num_sequences, other=0)
    owned = (index < num_sequences) & (starts // QUERIES + index <= tile)
    sequence = tl.sum(owned.to(tl.int32)) - 1
    start = tl.load(query_start_ptr + sequence)
    return sequence, start, tile - (start // QUERIES + sequence)


@triton.jit
def prefill_kernel(
    q_ptr, out_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, alibi_ptr,
    query_start_ptr, context_ptr, table_ptr,
    q_stride, alibi_stride, out_stride, table_stride, scale, window, softcap,
    num_sequences,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, QUERIES: tl.constexpr,
    SEQUENCES_PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BITS: tl.constexpr,
    WINDOW: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """QUERIES packed queries of one sequence, for one KV head's group of heads."""
    kv_head = tl.program_id(1)
    sequence, start, tile = _find_tile(
        query_start_ptr, num_sequences, tl.program_id(0), QUERIES, SEQUENCES_PADDED
    )
    length = tl.load(query_start_ptr + sequence + 1) - start
    first_query = tile * QUERIES
    if (length > 1) & (first_query < length):
        before = tl.load(context_ptr + sequence) - length
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, D_PADDED)
        queries = first_query + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        real = (rows < QUERIES * GROUP) & (queries < length)
        inside = real[:, None] & (dims[None, :] < D)
        tokens = (start + queries).to(tl.int64)
        positions = before + queries
        q, bias_rows, own_bias = load_queries(
            q_ptr, alibi_ptr, tokens, positions, heads, real, q_stride, alibi_stride,
            ROWS, D, D_PADDED, ALIBI
        )
        end = before + tl.minimum(first_query + QUERIES, length)
        first_split = 0
        if WINDOW:
            first_split = tl.maximum(before + first_query + 1 - window, 0) // SPLIT
        acc = tl.zeros([ROWS, D_PADDED], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        for split in range(first_split, tl.cdiv(end, SPLIT)):
            acc_next, total_next, peak_next = attend_split(
                q, positions, bias_rows, own_bias,
                split * SPLIT, tl.minimum((split + 1) * SPLIT, end), kv_head,
                table_ptr + sequence.to(tl.int64) * table_stride,
                k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, scale, window, softcap,
                ROWS, TILE, D, D_PADDED, KV_HEADS, BLOCK_SIZE, BITS,
                WINDOW, ALIBI, SOFTCAP, PRECISION,
            )
            acc, total, peak = merge(acc, total, peak, acc_next, total_next, peak_next)
        # Rows that stand for no query saw other keys or none: nothing of them is kept.
        total = tl.where(real, total, 1.0)
        out = tl.div_rn(acc, total[:, None])
        target = tokens[:, None] * out_stride + heads[:, None] * D + dims[None, :]
        tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=inside)
# fmt: on
