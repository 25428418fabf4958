"""Decode: one query a sequence, all splits of its context at once, then merged."""
# Triton reads parameters that a type checker has no types for.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, N803

import triton
import triton.language as tl

from .softmax import attend_split, load_queries, merge


# fmt: off
@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, alibi_ptr,
    query_start_ptr, context_ptr, table_ptr, acc_ptr, total_ptr, peak_ptr,
    q_stride, alibi_stride, table_stride, scale, window, softcap, num_splits,
    GROUP: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BITS: tl.constexpr,
    WINDOW: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """State of one sequence's single query over one split, for one KV head's group."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start_ptr + sequence)
    length = tl.load(query_start_ptr + sequence + 1) - token
    context = tl.load(context_ptr + sequence)
    begin = split * SPLIT
    needed = (length == 1) & (begin < context)
    if WINDOW:
        needed = needed & (begin + SPLIT > context - window)
    if needed:
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, D_PADDED)
        heads = kv_head * GROUP + rows
        real = rows < GROUP
        inside = real[:, None] & (dims[None, :] < D)
        tokens = tl.zeros([ROWS], tl.int64) + token
        positions = tl.zeros([ROWS], tl.int32) + context - 1
        q, bias_rows, own_bias = load_queries(
            q_ptr, alibi_ptr, tokens, positions, heads, real, q_stride, alibi_stride,
            ROWS, D, D_PADDED, ALIBI
        )
        acc, total, peak = attend_split(
            q, positions, bias_rows, own_bias,
            begin, tl.minimum(begin + SPLIT, context), kv_head,
            table_ptr + sequence.to(tl.int64) * table_stride,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, scale, window, softcap,
            ROWS, TILE, D, D_PADDED, KV_HEADS, BLOCK_SIZE, BITS,
            WINDOW, ALIBI, SOFTCAP, PRECISION,
        )
        state = (sequence * KV_HEADS * GROUP + heads).to(tl.int64) * num_splits + split
        tl.store(acc_ptr + state[:, None] * D + dims[None, :], acc, mask=inside)
        tl.store(total_ptr + state, total, mask=real)
        tl.store(peak_ptr + state, peak, mask=real)


@triton.jit
def reduce_kernel(
    out_ptr, acc_ptr, total_ptr, peak_ptr, query_start_ptr, context_ptr,
    out_stride, window, num_splits,
    SPLIT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Merges the splits of one sequence and head, first to last."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_ptr + sequence)
    length = tl.load(query_start_ptr + sequence + 1) - token
    if length == 1:
        context = tl.load(context_ptr + sequence)
        dims = tl.arange(0, D_PADDED)
        acc = tl.zeros([1, D_PADDED], tl.float32)
        total = tl.zeros([1], tl.float32)
        peak = tl.full([1], float("-inf"), tl.float32)
        first = 0
        if WINDOW:
            first = tl.maximum(context - window, 0) // SPLIT
        row = tl.arange(0, 1)
        states = (sequence * HEADS + head).to(tl.int64) * num_splits + row
        for split in range(first, tl.cdiv(context, SPLIT)):
            state = states + split
            source = acc_ptr + state[:, None] * D + dims[None, :]
            acc, total, peak = merge(
                acc, total, peak,
                tl.load(source, mask=dims[None, :] < D, other=0.0),
                tl.load(total_ptr + state), tl.load(peak_ptr + state),
            )
        target = token.to(tl.int64) * out_stride + head * D + dims[None, :]
        out = tl.div_rn(acc, total[:, None])
        tl.store(
            out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=dims[None, :] < D
        )
# fmt: on
