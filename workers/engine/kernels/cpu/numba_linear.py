"""Numba kernels of the quantized linear layer; bits as in reference.

No fast-math: float operations keep their order. The inner loop is a plain sum of
INT16 x INT8 products over contiguous memory, which LLVM turns into `vpmaddwd`.
"""

import numpy as np
from numba import njit, prange

FLOAT = np.float32
INT = np.int32
K_BLOCK = 512
INFINITY_BITS = INT(0x7F800000)
SIGN_MASK = INT(0x7FFFFFFF)
TINY = FLOAT(2.0**-100)
MAGIC = FLOAT(12582912.0)  # 1.5 * 2^23: adding it rounds half to even
ZERO, NAN = FLOAT(0.0), FLOAT(np.nan)
OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def largest_bits(bits: np.ndarray) -> np.int32:
    """Returns the largest magnitude in a float32 vector as a bit pattern."""
    top = INT(0)
    for i in range(bits.shape[0]):
        top = max(top, INT(bits[i] & SIGN_MASK))
    return top


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def quantize_row(
    x: np.ndarray, bits: np.ndarray, levels: np.float32, q: np.ndarray
) -> np.float32:
    """Quantizes one row into q (as long as x, or longer: the rest is 0)."""
    top = largest_bits(bits)
    largest = FLOAT(0.0)
    for i in range(x.shape[0]):
        largest = max(largest, abs(x[i]))
    q[:] = 0
    if top >= INFINITY_BITS:
        return NAN
    if largest < TINY:
        return ZERO
    factor = FLOAT(levels / largest)
    for i in range(x.shape[0]):
        q[i] = np.int16((FLOAT(x[i] * factor) + MAGIC) - MAGIC)
    return FLOAT(largest / levels)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def dot(w: np.ndarray, q: np.ndarray) -> np.float32:
    """Returns the sum of products: exact in blocks, blocks added in order."""
    total = ZERO
    for start in range(0, q.shape[0], K_BLOCK):
        end = min(start + K_BLOCK, q.shape[0])
        part = INT(0)
        for k in range(start, end):
            part = INT(part + INT(w[k]) * INT(q[k]))
        total += FLOAT(part)
    return total


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def linear(
    x: np.ndarray,
    bits: np.ndarray,
    levels: np.float32,
    w: np.ndarray,
    w_scale: np.ndarray,
    bias: np.ndarray,
    y: np.ndarray,
) -> None:
    """Writes x @ w.T + bias into y; an empty bias is none.

    Args:
        x: float32 [T, K].
        bits: The same memory as int32.
        levels: Largest quantized magnitude of an activation.
        w: int8 [N, K].
        w_scale: float32 [N].
        bias: float32 [N] or [0].
        y: float32 [T, N], overwritten.
    """
    rows, outputs = y.shape
    q = np.empty(x.shape, dtype=np.int16)
    x_scale = np.empty(rows, dtype=np.float32)
    for row in range(rows):
        x_scale[row] = quantize_row(x[row], bits[row], levels, q[row])
    tile = 32
    for part in prange((outputs + tile - 1) // tile):
        for n in range(part * tile, min(outputs, (part + 1) * tile)):
            for row in range(rows):
                value = FLOAT(dot(w[n], q[row]) * w_scale[n])
                value = FLOAT(value * x_scale[row])
                if bias.shape[0] > 0:
                    value = FLOAT(value + bias[n])
                y[row, n] = value
