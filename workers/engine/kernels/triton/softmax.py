"""The numeric core of paged attention, shared by decode and prefill.

A context is cut into splits at fixed positions and a split into tiles of keys. One
split's softmax runs over its tiles in order; the splits are then merged in order. A
tile or a split that a query does not see changes its numbers by exactly nothing (a
factor of one, a term of zero), so that a query's result depends on its own position
and on what is stored, never on the batch, the chunk or the kernel that computed it.
"""
# Triton reads parameters that a type checker has no types for.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl

from ..layout import INT4_GROUP

_GROUP = tl.constexpr(INT4_GROUP)


@triton.jit
def _tanh(x):
    """Hyperbolic tangent from `exp` alone, without cancellation near zero."""
    decay = tl.exp(-2.0 * tl.abs(x))
    ratio = (1.0 - decay) / (1.0 + decay)
    square = x * x
    series = x * (
        1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315)))
    )
    return tl.where(tl.abs(x) < 0.125, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def _shift(peak):
    """The peak to subtract: zero where no key has been seen yet."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def merge(acc, total, peak, acc_next, total_next, peak_next):
    """Joins the softmax state of a later split onto that of the earlier ones.

    States are (weighted sum of values, sum of weights, peak score); `acc` has one
    dimension more than the others, its last.
    """
    joined = tl.maximum(peak, peak_next)
    shift = _shift(joined)
    keep = tl.exp(peak - shift)
    add = tl.exp(peak_next - shift)
    acc = acc * tl.expand_dims(keep, -1) + acc_next * tl.expand_dims(add, -1)
    return acc, total * keep + total_next * add, joined


@triton.jit
def _round_to_tf32(x):
    """Rounds where the tensor core would cut off, which shrinks every weight a bit."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


# fmt: off
@triton.jit
def load_queries(
    q_ptr, alibi_ptr, tokens, positions, heads, real, q_stride, alibi_stride,
    ROWS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, ALIBI: tl.constexpr,
):
    """Rows of queries as float32, zero where not `real`; where each row's biases by
    position begin, and the one at its own position.
    """
    dims = tl.arange(0, D_PADDED)[None, :]
    source = tokens[:, None] * q_stride + heads[:, None] * D + dims
    q = tl.load(q_ptr + source, mask=real[:, None] & (dims < D), other=0.0)
    bias_rows = alibi_ptr + tl.where(real, heads, 0).to(tl.int64) * alibi_stride
    own_bias = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        own_bias = tl.load(bias_rows + positions, mask=real, other=0.0)
    return q.to(tl.float32), bias_rows, own_bias


@triton.jit
def _scores(
    q, k, k_scale, keys, end, positions, bias_rows, own_bias, scale, window, softcap,
    WINDOW: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores [rows, keys] of one tile, minus infinity where a key is not seen."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = scores * k_scale[None, :] * scale
    if SOFTCAP:
        scores = softcap * _tanh(scores / softcap)
    distance = keys[None, :] - positions[:, None]
    seen = (distance <= 0) & (keys[None, :] < end)
    if ALIBI:
        bias = tl.load(bias_rows[:, None] + keys[None, :], mask=seen, other=0.0)
        scores += bias - own_bias[:, None]
    if WINDOW:
        seen = seen & (distance > -window)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _load_stored(
    ptr, scale_ptr, slots, dims, inside, D: tl.constexpr, BITS: tl.constexpr
):
    """Keys or values [keys, dims] as float32; INT8 without its scale by key.

    INT4 comes with its scales by group: 3 bits of a value times the 8 of a bfloat16
    are exact in tf32.
    """
    if BITS == 4:
        packed = slots[:, None] * (D // 2) + dims[None, :] // 2
        halves = tl.load(ptr + packed, mask=inside, other=0).to(tl.int32)
        values = ((halves >> (dims[None, :] % 2 * 4)) & 15) - 8
        groups = slots[:, None] * tl.cdiv(D, _GROUP) + dims[None, :] // _GROUP
        scales = tl.load(scale_ptr + groups, mask=inside, other=0.0)
        stored = values.to(tl.float32) * scales.to(tl.float32)
    else:
        offsets = slots[:, None] * D + dims[None, :]
        stored = tl.load(ptr + offsets, mask=inside, other=0).to(tl.float32)
    return stored


@triton.jit
def attend_split(
    q, positions, bias_rows, own_bias, begin, end, kv_head, table_ptr,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, scale, window, softcap,
    ROWS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BITS: tl.constexpr,
    WINDOW: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax state of rows of queries over the stored keys `begin` to `end`.

    Operands of the products are float32 whatever the store: quantized values and half
    precision queries are exact in it and in the tensor cores' tf32.
    """
    acc = tl.zeros([ROWS, D_PADDED], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    dims = tl.arange(0, D_PADDED)
    for start in range(begin, end, TILE):
        keys = start + tl.arange(0, TILE)
        stored = keys < end
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=stored, other=0)
        slots = (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE
        slots += keys % BLOCK_SIZE
        inside = stored[:, None] & (dims[None, :] < D)
        k = _load_stored(k_ptr, k_scale_ptr, slots, dims, inside, D, BITS)
        v = _load_stored(v_ptr, v_scale_ptr, slots, dims, inside, D, BITS)
        k_scale = tl.full([TILE], 1.0, tl.float32)
        if BITS == 8:
            k_scale = tl.load(k_scale_ptr + slots, mask=stored, other=0.0)
        scores = _scores(
            q, k, k_scale, keys, end, positions, bias_rows, own_bias,
            scale, window, softcap,
            WINDOW, ALIBI, SOFTCAP, PRECISION,
        )
        peak_next = tl.maximum(peak, tl.max(scores, axis=1))
        shift = _shift(peak_next)
        weights = tl.exp(scores - shift[:, None])
        keep = tl.exp(peak - shift)
        total = total * keep + tl.sum(weights, axis=1)
        if BITS == 8:
            v_scale = tl.load(v_scale_ptr + slots, mask=stored, other=0.0)
        else:
            # A value that is not finite spoils the queries that see it, no others.
            sound = tl.min((tl.abs(v) < float("inf")).to(tl.int32), axis=1) == 1
            v = tl.where(tl.abs(v) < float("inf"), v, 0.0)
            v_scale = tl.where(sound, 1.0, float("nan"))
        # Not `scores > -inf`, which a NaN score would fail.
        hidden = scores == float("-inf")
        weights = tl.where(hidden, 0.0, weights * v_scale[None, :])
        if PRECISION == "tf32":
            weights = _round_to_tf32(weights)
        acc = acc * keep[:, None] + tl.dot(weights, v, input_precision=PRECISION)
        peak = peak_next
    return acc, total, peak
# fmt: on
