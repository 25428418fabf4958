"""Symmetric quantization on a GPU, to the bits of `reference.py`.

Rounding uses no library of device functions, and divisions are IEEE ones (the device's
default is an approximation, which moves values that lie next to a tie), so that the
interpreter and the device agree.
"""
# Triton reads parameters that a type checker has no types for.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, N803

import torch
import triton
import triton.language as tl

from ..reference import LEVELS, TINY

_TINY = tl.constexpr(TINY)
_ROUND_SHIFT = tl.constexpr(12582912.0)
"""1.5 * 2**23: a float32 of this size has no fraction bits, so adding it rounds."""


@triton.jit
def round_half_even(x):
    """Rounds float32 values of at most 2**22 in size, ties to the even integer."""
    return (x + _ROUND_SHIFT) - _ROUND_SHIFT


@triton.jit
def sizes(x):
    """Magnitudes of `x`, infinite where `x` is NaN so that a maximum keeps them."""
    size = tl.abs(x)
    return tl.where(size == size, size, float("inf"))


@triton.jit
def scale_or_nan(largest, scale):
    """The stored scale: zero for a vanishing vector, NaN for one not finite."""
    scale = tl.where(largest >= _TINY, scale, 0.0)
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def is_used(largest):
    """Whether a vector of this largest magnitude has quantized values at all."""
    return (largest >= _TINY) & (largest < float("inf"))


# fmt: off
@triton.jit
def _quantize_rows_kernel(
    x_ptr, out_ptr, scale_ptr, columns, x_stride, levels, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    seen = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        x = tl.load(x_ptr + row * x_stride + start + offsets, mask=inside, other=0.0)
        seen = tl.maximum(seen, sizes(x.to(tl.float32)))
    largest = tl.max(seen)
    used = is_used(largest)
    safe = tl.where(used, largest, 1.0)
    factor = tl.div_rn(levels, safe)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        x = tl.load(x_ptr + row * x_stride + start + offsets, mask=inside, other=0.0)
        x = tl.where(used, x.to(tl.float32), 0.0)
        values = round_half_even(x * factor).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * columns + start + offsets, values, mask=inside)
    tl.store(scale_ptr + row, scale_or_nan(largest, tl.div_rn(safe, levels)))
# fmt: on


def quantize_rows(
    x: torch.Tensor, activations: str = "int16"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each row by its own largest value, whatever rows stand beside it.

    Args:
        x: [T, K], float32 or half precision.
        activations: "int16" or "int8".

    Returns:
        [T, K] in that integer type and float32 scales [T], as in `reference.py`.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    dtype = torch.int16 if activations == "int16" else torch.int8
    values = torch.empty((rows, columns), dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _quantize_rows_kernel[(rows,)](
            x,
            values,
            scales,
            columns,
            x.stride(0),
            float(LEVELS[activations]),
            BLOCK=min(triton.next_power_of_2(columns), 4096),
            enable_fp_fusion=False,
        )
    return values, scales
