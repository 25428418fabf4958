"""Quantizes a step's keys and values and writes them to their slots, in one kernel."""
# Triton reads parameters that a type checker has no types for.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN202, N803

import torch
import triton
import triton.language as tl

from ..layout import KVLayer, StepLayout
from .quantize import is_used, round_half_even, scale_or_nan, sizes


# fmt: off
@triton.jit
def _write_token(
    source, target, scale_target, head_exists, inside, QUANTIZED: tl.constexpr,
):
    """One token of K or V: rows are heads, columns the head's dimensions."""
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if QUANTIZED:
        largest = tl.max(sizes(x), axis=1, keep_dims=True)
        used = is_used(largest)
        scale = tl.div_rn(tl.where(used, largest, 127.0), 127.0)
        values = round_half_even(tl.div_rn(tl.where(used, x, 0.0), scale))
        tl.store(target, values.to(tl.int8), mask=inside)
        tl.store(scale_target, scale_or_nan(largest, scale), mask=head_exists)
    else:
        tl.store(target, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _kv_write_kernel(
    k_ptr, v_ptr, slot_ptr, k_out, v_out, k_scale, v_scale,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr, D_PADDED: tl.constexpr, QUANTIZED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, D_PADDED)[None, :]
    exists = heads < HEADS
    inside = exists & (dims < D)
    # Stores are [block, head, offset]: a token's heads lie BLOCK_SIZE slots apart.
    slots = (slot // BLOCK_SIZE * HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    targets = slots * D + dims
    k_source = k_ptr + token * k_token_stride + heads * k_head_stride + dims
    v_source = v_ptr + token * v_token_stride + heads * v_head_stride + dims
    _write_token(k_source, k_out + targets, k_scale + slots, exists, inside, QUANTIZED)
    _write_token(v_source, v_out + targets, v_scale + slots, exists, inside, QUANTIZED)
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
        D_PADDED=triton.next_power_of_2(head_dim),
        QUANTIZED=quantized,
        enable_fp_fusion=False,
    )
