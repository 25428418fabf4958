"""Quantizes a step's keys and values and writes them to their slots, in one kernel."""
# Triton reads parameters that a type checker has no types for.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN202, N803

import torch
import triton
import triton.language as tl

from ..layout import INT4_GROUP, KVLayer, StepLayout
from ..reference import TINY
from .layout import STORED_BITS
from .quantize import is_used, round_half_even, scale_or_nan, sizes

_GROUP = tl.constexpr(INT4_GROUP)
_TINY = tl.constexpr(TINY)


# fmt: off
@triton.jit
def _write_token(
    source, target, scale_target, head_exists, inside, BITS: tl.constexpr,
):
    """One token of K or V: rows are heads, columns the head's dimensions."""
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if BITS == 8:
        largest = tl.max(sizes(x), axis=1, keep_dims=True)
        used = is_used(largest)
        scale = tl.div_rn(tl.where(used, largest, 127.0), 127.0)
        values = round_half_even(tl.div_rn(tl.where(used, x, 0.0), scale))
        tl.store(target, values.to(tl.int8), mask=inside)
        tl.store(scale_target, scale_or_nan(largest, scale), mask=head_exists)
    else:
        tl.store(target, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _bfloat16_of(x):
    """Finite float32 rounded to what bfloat16 holds, ties to even, still float32."""
    bits = x.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _int4(x, scale, used):
    """Elements [heads, groups, 8] as q + 8 in 0..15; groups not used are zero."""
    safe = tl.where(used, scale, 1.0)
    q = round_half_even(tl.div_rn(tl.where(used, x, 0.0), safe))
    return tl.minimum(tl.maximum(q, -8.0), 7.0).to(tl.int32) + 8


@triton.jit
def _write_token_int4(
    source, slots, target, scale_target, head_exists,
    D: tl.constexpr, HEADS_PADDED: tl.constexpr, D_PADDED: tl.constexpr,
):
    """One token of K or V; `source` is where each head begins, [heads, 1]."""
    groups_padded: tl.constexpr = D_PADDED // _GROUP
    columns = tl.arange(0, D_PADDED // 2)[None, :]
    inside = head_exists & (columns * 2 < D)
    low = tl.load(source + columns * 2, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + columns * 2 + 1, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(sizes(low), sizes(high)), axis=1, keep_dims=True)
    finite = (largest < float("inf"))[:, :, None]
    low = tl.reshape(low, [HEADS_PADDED, groups_padded, _GROUP // 2])
    high = tl.reshape(high, [HEADS_PADDED, groups_padded, _GROUP // 2])
    top = tl.max(tl.maximum(low, high), axis=2, keep_dims=True)
    bottom = tl.min(tl.minimum(low, high), axis=2, keep_dims=True)
    extreme = tl.where(top >= -bottom, top, bottom)
    used = finite & (tl.abs(extreme) >= _TINY)
    scale = _bfloat16_of(tl.where(used, extreme * -0.125, 0.0))
    packed = _int4(low, scale, used) | (_int4(high, scale, used) << 4)
    packed = tl.reshape(packed, [HEADS_PADDED, D_PADDED // 2])
    tl.store(target + slots * (D // 2) + columns, packed.to(tl.uint8), mask=inside)
    groups = tl.arange(0, groups_padded)[None, :]
    scale = tl.where(finite, scale, float("nan")).to(tl.bfloat16)
    tl.store(
        scale_target + slots * tl.cdiv(D, _GROUP) + groups,
        tl.reshape(scale, [HEADS_PADDED, groups_padded]),
        mask=head_exists & (groups * _GROUP < D),
    )


@triton.jit
def _kv_write_kernel(
    k_ptr, v_ptr, slot_ptr, k_out, v_out, k_scale, v_scale,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr, D_PADDED: tl.constexpr, BITS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, D_PADDED)[None, :]
    exists = heads < HEADS
    inside = exists & (dims < D)
    # Stores are [block, head, offset]: a token's heads lie BLOCK_SIZE slots apart.
    slots = (slot // BLOCK_SIZE * HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    k_source = k_ptr + token * k_token_stride + heads * k_head_stride
    v_source = v_ptr + token * v_token_stride + heads * v_head_stride
    if BITS == 4:
        _write_token_int4(
            k_source, slots, k_out, k_scale, exists, D, HEADS_PADDED, D_PADDED
        )
        _write_token_int4(
            v_source, slots, v_out, v_scale, exists, D, HEADS_PADDED, D_PADDED
        )
    else:
        at = slots * D + dims
        _write_token(k_source + dims, k_out + at, k_scale + slots, exists, inside, BITS)
        _write_token(v_source + dims, v_out + at, v_scale + slots, exists, inside, BITS)
# fmt: on


def kv_write(
    k: torch.Tensor, v: torch.Tensor, store_layer: KVLayer, layout: StepLayout
) -> None:
    """Writes the step's K and V into their slots (see `reference.kv_write`).

    Args:
        k: [T, kv_heads, D], float32 or half precision.
        v: As `k`.
        store_layer: The blocks of this layer, changed in place.
        layout: Gives each token its slot.
    """
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    tokens, heads, head_dim = k.shape
    if tokens == 0:
        return
    quantized = store_layer.k_scale is not None
    _kv_write_kernel[(tokens,)](
        k,
        v,
        layout.slot_mapping,
        store_layer.k,
        store_layer.v,
        # A float store has no scales; the kernel then leaves these pointers alone.
        store_layer.k_scale if quantized else store_layer.k,
        store_layer.v_scale if quantized else store_layer.v,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEADS=heads,
        D=head_dim,
        BLOCK_SIZE=store_layer.k.shape[2],
        HEADS_PADDED=triton.next_power_of_2(heads),
        D_PADDED=max(INT4_GROUP, triton.next_power_of_2(head_dim)),
        BITS=STORED_BITS[store_layer.kind],
        enable_fp_fusion=False,
    )
