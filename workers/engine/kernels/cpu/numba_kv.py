"""Numba kernels of the KV write and of a tile's way back; bits as in reference."""

import numpy as np
from numba import njit, types
from numba.extending import overload

from ..layout import INT4_GROUP
from .numba_linear import (
    FLOAT,
    INFINITY_BITS,
    INT,
    MAGIC,
    NAN,
    OPTIONS,
    TINY,
    ZERO,
    largest_bits,
)

TILE = 32
NAN_BFLOAT16 = np.uint16(0x7FC0)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def quantize_head(x: np.ndarray, bits: np.ndarray, q: np.ndarray) -> np.float32:
    """Quantizes one head's K or V to INT8 and returns its scale."""
    top = largest_bits(bits)
    largest = FLOAT(0.0)
    for i in range(x.shape[0]):
        largest = max(largest, abs(x[i]))
    q[:] = 0
    if top >= INFINITY_BITS:
        return NAN
    if largest < TINY:
        return ZERO
    scale = FLOAT(largest / FLOAT(127.0))
    for i in range(x.shape[0]):
        q[i] = np.int8((FLOAT(x[i] / scale) + MAGIC) - MAGIC)
    return scale


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def write_int8(
    values: np.ndarray,
    bits: np.ndarray,
    slots: np.ndarray,
    store: np.ndarray,
    scales: np.ndarray,
) -> None:
    """Quantizes float32 [T, heads, D] into the slots of an INT8 store."""
    block_size = store.shape[2]
    for token in range(values.shape[0]):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(values.shape[1]):
            scales[block, head, offset] = quantize_head(
                values[token, head], bits[token, head], store[block, head, offset]
            )


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def to_bfloat16(x: np.float32) -> np.uint16:
    """Rounds a finite float to bfloat16 bits, half to even."""
    bits = np.int64(FLOAT(x).view(np.uint32))
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def from_bfloat16(bits: np.uint16) -> np.float32:
    """Widens bfloat16 bits."""
    return INT(INT(bits) << 16).view(np.float32)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def quantize_group(x: np.ndarray, q: np.ndarray) -> np.uint16:
    """Writes a group's q + 8, one a byte; returns its scale as bfloat16 bits."""
    top, low = x[0], x[0]
    for i in range(x.shape[0]):
        top, low = max(top, x[i]), min(low, x[i])
    extreme = top if top >= -low else low
    q[:] = 8
    if abs(extreme) < TINY:
        return np.uint16(0)
    bits: np.uint16 = to_bfloat16(FLOAT(extreme * FLOAT(-0.125)))
    scale = from_bfloat16(bits)
    for i in range(x.shape[0]):
        level = (FLOAT(x[i] / scale) + MAGIC) - MAGIC
        q[i] = np.uint8(min(max(level, FLOAT(-8.0)), FLOAT(7.0)) + FLOAT(8.0))
    return bits


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def write_int4(
    values: np.ndarray,
    bits: np.ndarray,
    slots: np.ndarray,
    store: np.ndarray,
    scales: np.ndarray,
) -> None:
    """Quantizes float32 [T, heads, D] into the slots of an INT4 store.

    Args:
        values: float32 [T, heads, D].
        bits: The same memory as int32.
        slots: int64 [T].
        store: uint8 [blocks, heads, block_size, D / 2].
        scales: uint16 [blocks, heads, block_size, groups], bits of bfloat16.
    """
    block_size, dim = store.shape[2], values.shape[2]
    q = np.empty(dim, dtype=np.uint8)
    for token in range(values.shape[0]):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(values.shape[1]):
            packed, scale = store[block, head, offset], scales[block, head, offset]
            if largest_bits(bits[token, head]) >= INFINITY_BITS:
                packed[:], scale[:] = 0x88, NAN_BFLOAT16
                continue
            for group in range(scale.shape[0]):
                part = slice(group * INT4_GROUP, min(dim, (group + 1) * INT4_GROUP))
                scale[group] = quantize_group(values[token, head, part], q[part])
            for j in range(dim // 2):
                packed[j] = q[2 * j] | (q[2 * j + 1] << 4)


def load_tile(
    store: np.ndarray,
    groups: np.ndarray,
    table: np.ndarray,
    tile: int,
    last: int,
    head: int,
    out: np.ndarray,
) -> None:
    """Converts a tile of 32 keys or values to float32, without the scales of INT8.

    Args:
        store: A layer's K or V, as in `KVLayer`.
        groups: Its scales if it is INT4 (uint16, bits of bfloat16), else not read.
        table: The sequence's blocks.
        tile: Position of the tile's first key.
        last: Position of the last key; the tile repeats it.
        head: KV head.
        out: float32 [32, D].

    Raises:
        NotImplementedError: Called from Python: Numba compiles one by the store's type.
    """
    raise NotImplementedError("load_tile is for compiled callers")


# Not strict: strictly, even the annotations would have to be those of the kernels.
@overload(load_tile, strict=False)  # type: ignore[untyped-decorator]
def _choose_loader(store: types.Array, *_others: types.Type) -> object:
    return _load_int4 if store.dtype == types.uint8 else _load_plain


def _load_plain(
    store: np.ndarray,
    groups: np.ndarray,  # noqa: ARG001
    table: np.ndarray,
    tile: int,
    last: int,
    head: int,
    out: np.ndarray,
) -> None:
    block_size = store.shape[2]
    for i in range(TILE):
        key = min(tile + i, last)
        row = store[table[key // block_size], head, key % block_size]
        for d in range(out.shape[1]):
            out[i, d] = row[d]


def _load_int4(
    store: np.ndarray,
    groups: np.ndarray,
    table: np.ndarray,
    tile: int,
    last: int,
    head: int,
    out: np.ndarray,
) -> None:
    block_size = store.shape[2]
    for i in range(TILE):
        key = min(tile + i, last)
        block, offset = table[key // block_size], key % block_size
        row, scales = store[block, head, offset], groups[block, head, offset]
        for j in range(row.shape[0]):
            scale = from_bfloat16(scales[2 * j // INT4_GROUP])
            out[i, 2 * j] = FLOAT(INT(row[j] & 15) - INT(8)) * scale
            out[i, 2 * j + 1] = FLOAT(INT(row[j] >> 4) - INT(8)) * scale
