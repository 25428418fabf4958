"""The numeric definition of every CPU kernel, in plain torch.

Linear: weights are symmetric INT8 per output channel, activations symmetric INT16 (or
INT8) per row. Products are summed exactly in integers over blocks of `K_BLOCK` inputs;
each block's sum is rounded to float32 once and the blocks are added in rising order.
So the result of a row depends on nothing but that row, and every backend gives the
same bits. Attention agrees to 1e-5: backends sum it in their own order.

A row with NaN or infinity gives NaN in all of its outputs and touches no other row.
"""

import torch

from .layout import INT4_GROUP, KVLayer, PackedWeight, StepLayout, int4_groups

K_BLOCK = 512
"""Inputs per exact int32 sum: 512 * 32767 * 127 is the last power of two below 2^31."""
LEVELS = {"int16": 32767, "int8": 127}
"""Largest quantized magnitude per kind of activation."""
TINY = 2.0**-100
"""Rows (and KV heads) whose largest magnitude is below this count as zero: their
scale would be denormal, and denormals differ between CPU modes."""


def quantize_channels(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a weight per output channel.

    Args:
        w: float32 [N, K], finite.

    Returns:
        int8 [N, K] and float32 [N] with w ~ q * scale.
    """
    largest = w.abs().amax(dim=1)
    # By a tensor: on a GPU torch turns tensor / number into a product, which rounds.
    scale = largest / torch.full_like(largest, 127.0)
    safe = torch.where(scale >= TINY, scale, torch.ones_like(scale))
    q = torch.round(w / safe[:, None]).clamp_(-127, 127)
    q[scale < TINY] = 0
    return q.to(torch.int8), torch.where(scale >= TINY, scale, torch.zeros_like(scale))


def quantize_rows(
    x: torch.Tensor, activations: str = "int16"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes activations per row: q = round_half_even(x * (levels / max|x|)).

    Args:
        x: float32 [T, K].
        activations: "int16" or "int8".

    Returns:
        int16 [T, K] and float32 [T] with x ~ q * scale; a row that is not finite has
        q = 0 and scale = NaN.
    """
    levels = float(LEVELS[activations])
    largest = x.abs().amax(dim=1) if x.shape[1] else x.new_zeros(x.shape[0])
    finite = torch.isfinite(x).all(dim=1)
    used = finite & (largest >= TINY)
    safe = torch.where(used, largest, torch.ones_like(largest))
    # A true division: torch turns number / tensor into a product with a reciprocal.
    factor = torch.full_like(safe, levels) / safe
    q = torch.round(x * factor[:, None])
    q = torch.where(used[:, None], q, torch.zeros_like(q)).to(torch.int16)
    scale = torch.where(used, safe / levels, torch.zeros_like(safe))
    return q, torch.where(finite, scale, torch.full_like(scale, float("nan")))


def quantize_weight(w: torch.Tensor, *, activations: str = "int16") -> PackedWeight:
    """Quantizes and packs a weight for `linear` of this module.

    Args:
        w: float32 [N, K].
        activations: "int16" or "int8".
    """
    q, scale = quantize_channels(w)
    return PackedWeight(q, scale, w.shape[0], w.shape[1], activations, "reference")


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes x @ w.T + bias.

    Args:
        x: float32 [T, K].
        weight: From `quantize_weight`.
        bias: float32 [N] or None.

    Returns:
        float32 [T, N].
    """
    q, x_scale = quantize_rows(x, weight.activations)
    total = x.new_zeros((x.shape[0], weight.out_features))
    for start in range(0, weight.in_features, K_BLOCK):
        part = slice(start, start + K_BLOCK)
        # float64 holds these integer sums exactly, whatever the order of addition.
        exact = q[:, part].double() @ weight.data[:, part].double().T
        total += exact.float()
    # This order neither overflows nor underflows before the end.
    y = (total * weight.scale[None, :]) * x_scale[:, None]
    return y if bias is None else y + bias


def kv_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes K or V per token and head: q = round_half_even(x / scale).

    Args:
        x: float32 [T, heads, D].

    Returns:
        int8 [T, heads, D] and float32 [T, heads] with scale = max|x| / 127; a vector
        that is not finite has q = 0 and scale = NaN, so who reads it gets NaN.
    """
    largest = x.abs().amax(dim=-1)
    finite = torch.isfinite(x).all(dim=-1)
    used = finite & (largest >= TINY)
    scale = torch.where(used, largest, torch.full_like(largest, 127.0)) / 127.0
    q = torch.round(x / scale[..., None])
    q = torch.where(used[..., None], q, torch.zeros_like(q)).to(torch.int8)
    scale = torch.where(used, scale, torch.zeros_like(scale))
    return q, torch.where(finite, scale, torch.full_like(scale, float("nan")))


def kv_quantize_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes K or V per token, head and group of 16 neighbouring elements.

    A group's scale is its element m of largest magnitude (the positive one of two) over
    -8, rounded to bfloat16: 16 levels with one of them at m, as in llama.cpp's Q4_0.
    q = clamp(round_half_even(x / scale), -8, 7), stored as q + 8.

    Args:
        x: float32 [T, heads, D], D even; the last group may be short.

    Returns:
        uint8 [T, heads, D / 2], element 2j in the low half of byte j, and bfloat16
        [T, heads, ceil(D / 16)]; a vector that is not finite has every scale NaN.
    """
    padding = -x.shape[-1] % INT4_GROUP
    shape = (*x.shape[:-1], int4_groups(x.shape[-1]), INT4_GROUP)
    groups = torch.nn.functional.pad(x, (0, padding)).reshape(shape)
    finite = torch.isfinite(x).all(dim=-1)[..., None]
    top, low = groups.amax(dim=-1), groups.amin(dim=-1)
    extreme = torch.where(top >= -low, top, low)
    used = finite & (extreme.abs() >= TINY)
    scale = torch.where(used, extreme * -0.125, torch.zeros_like(extreme)).bfloat16()
    safe = torch.where(used, scale.float(), torch.ones_like(extreme))
    q = torch.round(groups / safe[..., None]).clamp(-8, 7)
    q = torch.where(used[..., None], q, torch.zeros_like(q)) + 8
    q = q.to(torch.uint8).flatten(-2)[..., : x.shape[-1]]
    packed = q[..., 0::2] | (q[..., 1::2] << 4)
    return packed, torch.where(finite, scale, torch.full_like(scale, float("nan")))


def kv_floats(q: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Returns stored K or V as float64 [..., D].

    Args:
        q: As in `KVLayer.k`, any leading dimensions.
        scale: As in `KVLayer.k_scale`, the same leading dimensions.
    """
    if scale is None:
        return q.double()
    if q.dtype == torch.int8:
        return q.double() * scale.double()[..., None]
    values = torch.stack((q & 15, q >> 4), dim=-1).flatten(-2).double() - 8
    spread = scale.double().repeat_interleave(INT4_GROUP, dim=-1)
    return values * spread[..., : values.shape[-1]]


def kv_write(
    k: torch.Tensor, v: torch.Tensor, layer: KVLayer, layout: StepLayout
) -> None:
    """Writes the step's K and V into their slots, quantized as the store is.

    Args:
        k: float32 [T, kv_heads, D].
        v: float32 [T, kv_heads, D].
        layer: The layer's store, changed in place.
        layout: Gives each token's slot.
    """
    block_size = layer.k.shape[2]
    block = layout.slot_mapping // block_size
    offset = layout.slot_mapping % block_size
    quantize = kv_quantize_int4 if layer.kind == "int4" else kv_quantize
    for values, store, scales in (
        (k, layer.k, layer.k_scale),
        (v, layer.v, layer.v_scale),
    ):
        if scales is None:
            store[block, :, offset] = values
            continue
        q, scale = quantize(values)
        store[block, :, offset] = q
        scales[block, :, offset] = scale


def _gather(
    store: torch.Tensor,
    scales: torch.Tensor | None,
    blocks: torch.Tensor,
    length: int,
    group: int,
) -> torch.Tensor:
    """Returns float64 [heads, length, D] of one sequence, `group` heads per KV head."""
    values = kv_floats(store[blocks], None if scales is None else scales[blocks])
    heads, dim = values.shape[1], values.shape[3]
    values = values.permute(1, 0, 2, 3).reshape(heads, -1, dim)[:, :length]
    return values.repeat_interleave(group, 0)


def paged_attention(
    q: torch.Tensor,
    layer: KVLayer,
    layout: StepLayout,
    *,
    scale: float,
    window: int | None = None,
    alibi: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of packed queries over the paged store.

    score(i, j) = cap(scale * q_i . k_j) + alibi_j - alibi_i, with
    cap(s) = softcap * tanh(s / softcap), over max(0, i - window + 1) <= j <= i.

    Args:
        q: float32 [T, heads, D]; heads is a multiple of the store's KV heads.
        layer: The layer's store; this step's own K and V are already written.
        layout: Sequences of the step.
        scale: Factor on the dot products.
        window: Keys that a query sees, itself included; None is all.
        alibi: float32 [heads, positions], at least the longest context, or None. A
            table and not slopes: models differ in how they round the bias.
        softcap: Bound of the scores or None.

    Returns:
        float32 [T, heads, D].
    """
    out = torch.empty_like(q)
    block_size, group = layer.k.shape[2], q.shape[1] // layer.k.shape[1]
    for s in range(len(layout.context_length)):
        start, end = (int(n) for n in layout.query_start[s : s + 2])
        length = int(layout.context_length[s])
        if start == end:
            continue
        blocks = layout.block_table[s, : -(-length // block_size)].long()
        keys = _gather(layer.k, layer.k_scale, blocks, length, group)
        values = _gather(layer.v, layer.v_scale, blocks, length, group)
        scores = scale * torch.einsum("thd,hkd->htk", q[start:end].double(), keys)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        here = torch.arange(length - (end - start), length)[:, None]
        there = torch.arange(length)[None, :]
        if alibi is not None:
            bias = alibi.double()
            scores = scores + (bias[:, there] - bias[:, here])
        out[start:end] = _mix(scores, values, _hidden(here, there, window)).float()
    return out


def _hidden(
    here: torch.Tensor, there: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Returns bool [T, keys]: which keys a query does not see.

    Args:
        here: int64 [T, 1], positions of the queries.
        there: int64 [1, keys], positions of the keys.
        window: As in `paged_attention`.
    """
    later = there > here
    return later if window is None else later | (there <= here - window)


def _mix(
    scores: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Returns the softmax-weighted values that each query sees.

    Args:
        scores: float64 [heads, T, keys].
        values: float64 [heads, keys, D].
        hidden: bool [T, keys].

    Returns:
        float64 [T, heads, D].
    """
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    # A hidden value that is not finite must not leak through 0 * NaN.
    bad = ~torch.isfinite(values).all(dim=-1)
    mixed = torch.einsum("htk,hkd->thd", weights, torch.nan_to_num(values))
    seen = (bad[:, None, :] & ~hidden[None]).any(dim=-1)
    mixed[seen.T] = float("nan")
    return mixed
