"""Numba kernel of paged attention: 32 keys at a time, aligned to key positions.

Each query row is computed alone and visits the tiles in rising order, so its result is
the same bits in decode, in any prefill chunk and beside any neighbours.
"""

import math

import numpy as np
from numba import njit, prange

from .numba_kv import TILE, load_tile
from .numba_linear import FLOAT, OPTIONS

QUERIES = 16
"""Queries per work item: they share a tile's conversion to float."""
HIDDEN = FLOAT(-np.inf)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def load_scales(
    scales: np.ndarray,
    table: np.ndarray,
    tile: int,
    last: int,
    head: int,
    factor: np.float32,
    out: np.ndarray,
) -> None:
    """Fetches a tile's scales, times a factor; an empty array means scale 1."""
    for i in range(TILE):
        out[i] = factor
        if scales.shape[0] > 0:
            key = min(tile + i, last)
            block, offset = key // scales.shape[2], key % scales.shape[2]
            out[i] = scales[table[block], head, offset] * factor


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def score_row(
    query: np.ndarray,
    keys: np.ndarray,
    k_scale: np.ndarray,
    lo: int,
    hi: int,
    tile: int,
    own: int,
    bias: np.ndarray,
    softcap: np.float32,
    scores: np.ndarray,
) -> None:
    """Scores one query against keys lo..hi of a tile.

    Args:
        query: float32 [D].
        keys: float32 [D, 32].
        k_scale: float32 [32], score factor included.
        lo: First visible key of the tile.
        hi: One past the last visible key.
        tile: Position of the tile's first key.
        own: The query's position.
        bias: float32 by position, or an empty array.
        softcap: Bound of the scores or 0.
        scores: float32 [32], overwritten; only lo..hi are scores.
    """
    for i in range(TILE):
        scores[i] = FLOAT(0.0)
    for d in range(query.shape[0]):
        factor = query[d]
        for i in range(TILE):
            scores[i] += factor * keys[d, i]
    for i in range(lo, hi):
        score = FLOAT(scores[i] * k_scale[i])
        if softcap > FLOAT(0.0):
            score = FLOAT(softcap * FLOAT(math.tanh(FLOAT(score / softcap))))
        if bias.shape[0] > 0:
            score = FLOAT(score + FLOAT(bias[tile + i] - bias[own]))
        scores[i] = score


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def add_row(
    scores: np.ndarray,
    values: np.ndarray,
    v_scale: np.ndarray,
    lo: int,
    hi: int,
    sums: np.ndarray,
    state: np.ndarray,
) -> None:
    """Adds keys lo..hi of a tile to one row's running softmax.

    Args:
        scores: float32 [32].
        values: float32 [32, D].
        v_scale: float32 [32].
        lo: First visible key of the tile.
        hi: One past the last visible key.
        sums: float32 [D], weighted values so far.
        state: float32 [2]: largest score and sum of weights so far.
    """
    dim = sums.shape[0]
    top = state[0]
    for i in range(lo, hi):
        top = max(top, scores[i])
    keep = FLOAT(0.0)
    if state[0] > HIDDEN:
        keep = FLOAT(math.exp(FLOAT(state[0] - top)))
    mass = FLOAT(state[1] * keep)
    for d in range(dim):
        sums[d] *= keep
    for i in range(lo, hi):
        weight = FLOAT(math.exp(FLOAT(scores[i] - top)))
        mass = FLOAT(mass + weight)
        weight = FLOAT(weight * v_scale[i])
        for d in range(dim):
            sums[d] += weight * values[i, d]
    state[0], state[1] = top, mass


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def attend_item(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    k_scales: np.ndarray,
    v_scales: np.ndarray,
    k_groups: np.ndarray,
    v_groups: np.ndarray,
    item: np.ndarray,
    table: np.ndarray,
    scale: np.float32,
    window: int,
    alibi: np.ndarray,
    softcap: np.float32,
    out: np.ndarray,
) -> None:
    """Attends for the queries of one item; arguments as in `attend`."""
    sequence, head, token, count, base = item
    blocks = table[sequence]
    dim, group = q.shape[2], q.shape[1] // k.shape[1]
    keys = np.empty((dim, TILE), dtype=np.float32)
    values = np.empty((TILE, dim), dtype=np.float32)
    k_scale = np.empty(TILE, dtype=np.float32)
    v_scale = np.empty(TILE, dtype=np.float32)
    scores = np.empty(TILE, dtype=np.float32)
    sums = np.zeros((count * group, dim), dtype=np.float32)
    state = np.zeros((count * group, 2), dtype=np.float32)
    state[:, 0] = HIDDEN
    last = base + count - 1
    start = max(0, base - window + 1) if window > 0 else 0
    for tile in range(start // TILE * TILE, last + 1, TILE):
        load_tile(k, k_groups, blocks, tile, last, head, keys.T)
        load_tile(v, v_groups, blocks, tile, last, head, values)
        load_scales(k_scales, blocks, tile, last, head, scale, k_scale)
        load_scales(v_scales, blocks, tile, last, head, FLOAT(1.0), v_scale)
        for row in range(count * group):
            at = base + row // group - tile
            lo = max(0, at - window + 1) if window > 0 else 0
            hi = min(TILE, at + 1)
            if lo < hi:
                own = head * group + row % group
                query, bias = q[token + row // group, own], alibi[own]
                score_row(
                    query,
                    keys,
                    k_scale,
                    lo,
                    hi,
                    tile,
                    tile + at,
                    bias,
                    softcap,
                    scores,
                )
                add_row(scores, values, v_scale, lo, hi, sums[row], state[row])
    for row in range(count * group):
        mixed = out[token + row // group, head * group + row % group]
        for d in range(dim):
            mixed[d] = sums[row, d] / state[row, 1]


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    k_scales: np.ndarray,
    v_scales: np.ndarray,
    k_groups: np.ndarray,
    v_groups: np.ndarray,
    items: np.ndarray,
    table: np.ndarray,
    scale: np.float32,
    window: int,
    alibi: np.ndarray,
    softcap: np.float32,
    out: np.ndarray,
) -> None:
    """Attends for every item; see `reference.paged_attention`.

    Args:
        q: float32 [T, heads, D].
        k: int8, float32 or uint8 (INT4) store.
        v: Same for values.
        k_scales: float32 scales of an INT8 store, else an empty array.
        v_scales: Same for values.
        k_groups: Scales of an INT4 store (uint16, bits of bfloat16), else empty.
        v_groups: Same for values.
        items: int64 [items, 5]: sequence, KV head, first packed token, tokens, and
            the first token's position.
        table: int32 block table.
        scale: Factor on the dot products.
        window: 0 is none.
        alibi: float32 [heads, positions]; no positions for none.
        softcap: 0 is none.
        out: float32 [T, heads, D], overwritten.
    """
    for index in prange(items.shape[0]):
        attend_item(
            q,
            k,
            v,
            k_scales,
            v_scales,
            k_groups,
            v_groups,
            items[index],
            table,
            scale,
            window,
            alibi,
            softcap,
            out,
        )
