"""Linear layers on integers: the exact product, and what turns it back into floats.

Sums of integers are exact, so tile sizes and the choice of a matrix product change no
bit; only the order of the float additions at block borders counts, and it is fixed.
"""
# Triton reads parameters that a type checker has no types for.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN202, N803

import torch
import triton
import triton.language as tl

from ..layout import PackedWeight
from ..reference import K_BLOCK
from .quantize import quantize_rows

_COLUMNS = 64
"""Output channels of a tile."""
_INNER = 64
"""Inputs of one product of tiles; divides K_BLOCK."""
_MAX_ROWS = 64
"""Rows of a tile at most; fewer when the batch is smaller."""


# fmt: off
@triton.jit
def _block_sum(
    x_ptr, w_ptr, rows, columns, row_exists, column_exists, begin, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    LENGTH: tl.constexpr, WIDE: tl.constexpr,
):
    """Exact int32 sum of products over LENGTH inputs from `begin` on.

    16-bit inputs are 256 * high + low + 128 with both parts in 8 bits; the constant
    comes in through the sum of the weights. Nothing exceeds 2**31 for LENGTH 512.
    """
    high = tl.zeros([ROWS, COLUMNS], tl.int32)
    low = tl.zeros([ROWS, COLUMNS], tl.int32)
    weight_sum = tl.zeros([COLUMNS], tl.int32)
    for start in range(begin, tl.minimum(begin + LENGTH, K), INNER):
        inner = start + tl.arange(0, INNER)
        x = tl.load(
            x_ptr + rows[:, None] * K + inner[None, :],
            mask=row_exists[:, None] & (inner[None, :] < K), other=0,
        )
        w = tl.load(
            w_ptr + columns[None, :] * K + inner[:, None],
            mask=column_exists[None, :] & (inner[:, None] < K), other=0,
        )
        if WIDE:
            high = tl.dot((x >> 8).to(tl.int8), w, high, out_dtype=tl.int32)
            low = tl.dot(((x & 255) - 128).to(tl.int8), w, low, out_dtype=tl.int32)
            weight_sum += tl.sum(w.to(tl.int32), axis=0)
        else:
            low = tl.dot(x, w, low, out_dtype=tl.int32)
    if WIDE:
        low = high * 256 + low + 128 * weight_sum[None, :]
    return low


@triton.jit
def _linear_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, T, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    LENGTH: tl.constexpr, WIDE: tl.constexpr, BIAS: tl.constexpr,
):
    """One tile of outputs: each block's sum becomes a float, blocks add up in order."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row_exists, column_exists = rows < T, columns < N
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, K, LENGTH):
        total += _block_sum(
            x_ptr, w_ptr, rows, columns, row_exists, column_exists, begin, K,
            ROWS, COLUMNS, INNER, LENGTH, WIDE,
        ).to(tl.float32)
    x_scale = tl.load(x_scale_ptr + rows, mask=row_exists, other=0.0)
    w_scale = tl.load(w_scale_ptr + columns, mask=column_exists, other=0.0)
    y = (total * w_scale[None, :]) * x_scale[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=column_exists, other=0.0)
        y += bias.to(tl.float32)[None, :]
    tl.store(
        out_ptr + rows[:, None] * N + columns[None, :], y.to(out_ptr.dtype.element_ty),
        mask=row_exists[:, None] & column_exists[None, :],
    )


@triton.jit
def _matmul_kernel(
    x_ptr, w_ptr, out_ptr, T, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """One tile of the int32 product of int8 matrices."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row_exists, column_exists = rows < T, columns < N
    total = tl.zeros([ROWS, COLUMNS], tl.int32)
    for begin in range(0, K, LENGTH):
        total += _block_sum(
            x_ptr, w_ptr, rows, columns, row_exists, column_exists, begin, K,
            ROWS, COLUMNS, INNER, LENGTH, False,
        )
    tl.store(
        out_ptr + rows[:, None] * N + columns[None, :], total,
        mask=row_exists[:, None] & column_exists[None, :],
    )


@triton.jit
def _rescale_kernel(
    acc_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, x_ptr, outlier_ptr, outlier_w_ptr,
    out_ptr, N, x_stride, BLOCK: tl.constexpr, OUTLIERS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """One row's products back to floats, plus its outlier inputs in their order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < N
    acc = tl.load(acc_ptr + row * N + columns, mask=exists, other=0).to(tl.float32)
    w_scale = tl.load(w_scale_ptr + columns, mask=exists, other=0.0)
    y = (acc * w_scale) * tl.load(x_scale_ptr + row)
    for index in range(OUTLIERS):
        x = tl.load(x_ptr + row * x_stride + tl.load(outlier_ptr + index))
        w = tl.load(outlier_w_ptr + index * N + columns, mask=exists, other=0.0)
        y += x.to(tl.float32) * w
    if BIAS:
        y += tl.load(bias_ptr + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, y.to(out_ptr.dtype.element_ty), mask=exists)
# fmt: on


def _tiles(rows: int, columns: int) -> tuple[int, tuple[int, int]]:
    """Rows of a tile for this batch, and the grid of tiles."""
    tile = min(max(16, triton.next_power_of_2(rows)), _MAX_ROWS)
    return tile, (triton.cdiv(rows, tile), triton.cdiv(columns, _COLUMNS))


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes x @ w.T + bias to the bits of `reference.linear`.

    Args:
        x: [T, K], float32 or half precision.
        weight: int8 [N, K] with a scale per output channel.
        bias: [N] or None.

    Returns:
        [T, N] in the type of `x`.
    """
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return out
    values, scales = quantize_rows(x, weight.activations)
    rows, grid = _tiles(*out.shape)
    _linear_kernel[grid](
        values,
        scales,
        weight.data,
        weight.scale,
        scales if bias is None else bias,
        out,
        *out.shape,
        weight.in_features,
        ROWS=rows,
        COLUMNS=_COLUMNS,
        INNER=_INNER,
        LENGTH=K_BLOCK,
        WIDE=weight.activations == "int16",
        BIAS=bias is not None,
        enable_fp_fusion=False,
    )
    return out


def int8_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiplies INT8 matrices exactly.

    Args:
        a: int8 [T, K], contiguous.
        b: int8 [N, K], contiguous; K at most 130 000, so that no sum overflows.

    Returns:
        int32 [T, N], a @ b.T.
    """
    (rows, inner), columns = a.shape, b.shape[0]
    out = torch.empty((rows, columns), dtype=torch.int32, device=a.device)
    if rows:
        tile, grid = _tiles(rows, columns)
        _matmul_kernel[grid](
            a,
            b,
            out,
            rows,
            columns,
            inner,
            ROWS=tile,
            COLUMNS=_COLUMNS,
            INNER=_INNER,
            LENGTH=K_BLOCK,
        )
    return out


def rescale(
    products: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    outlier_columns: torch.Tensor | None = None,
    outlier_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turns integer products into outputs and adds outlier inputs in full precision.

    Args:
        products: int32 [T, N].
        x: [T, K], the inputs; gives the outliers' values and the result's type.
        x_scale: float32 [T].
        w_scale: float32 [N].
        bias: [N] or None.
        outlier_columns: int64 [M], inputs that the products leave out, or None.
        outlier_weight: float32 [M, N], the weight of these inputs.

    Returns:
        [T, N] in the type of `x`. A row's value depends on that row alone: a library's
        float product would choose its order of addition by the number of rows.
    """
    rows, columns = products.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    block = min(1024, triton.next_power_of_2(columns))
    count = 0 if outlier_columns is None else outlier_columns.shape[0]
    _rescale_kernel[(rows, triton.cdiv(columns, block))](
        products,
        x_scale,
        w_scale,
        x_scale if bias is None else bias,
        x,
        products if outlier_columns is None else outlier_columns,
        x_scale if outlier_weight is None else outlier_weight,
        out,
        columns,
        x.stride(0),
        BLOCK=block,
        OUTLIERS=count,
        BIAS=bias is not None,
        enable_fp_fusion=False,
    )
    return out
