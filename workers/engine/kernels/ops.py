"""The kernels that the model calls: checks once, then the backend of this host."""

import torch

from ....shared.errors import EngineError
from .backends import backend, backend_report, set_num_threads
from .composed import LlamaLayerWeights
from .layout import KVLayer, PackedWeight, StepLayout

__all__ = [
    "ACTIVATIONS",
    "backend",
    "backend_report",
    "kv_write",
    "linear",
    "llama_layer",
    "paged_attention",
    "quantize_weight",
    "rms_norm",
    "rotate",
    "set_num_threads",
    "silu_multiply",
]

ACTIVATIONS = ("int16", "int8")


def quantize_weight(w: torch.Tensor, *, activations: str = "int16") -> PackedWeight:
    """Quantizes a weight to INT8 per output channel and packs it for `linear`.

    Args:
        w: float32 [N, K].
        activations: "int16" (practically exact) or "int8": how inputs are quantized.

    Returns:
        The packed weight; it belongs to the backend in force.

    Raises:
        EngineError: Wrong shape, dtype or activations, or a weight is not finite.
    """
    if activations not in ACTIVATIONS:
        raise EngineError(
            f"activations '{activations}' unknown; expected one of {ACTIVATIONS}"
        )
    if w.dim() != 2 or w.dtype != torch.float32:
        raise EngineError(
            f"weight is {w.dtype} {list(w.shape)}; expected float32 [N, K]"
        )
    # amax hands NaN on and, unlike isfinite, makes no mask of the weight's size.
    if not bool(torch.isfinite(torch.stack(torch.aminmax(w))).all()):
        raise EngineError("weight has NaN or infinity; the checkpoint is damaged")
    return backend().quantize_weight(w.contiguous(), activations=activations)


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes x @ w.T + bias, each row alone (see `reference.linear`).

    Args:
        x: float32 [T, K].
        weight: From `quantize_weight`.
        bias: float32 [N] or None.

    Returns:
        float32 [T, N].

    Raises:
        EngineError: Shapes or dtypes do not match.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype != torch.float32:
        raise EngineError(
            f"input is {x.dtype} {list(x.shape)}; "
            f"expected float32 [tokens, {weight.in_features}]"
        )
    if x.stride(1) != 1:
        x = x.contiguous()
    return backend().linear(x, weight, bias)


def kv_write(
    k: torch.Tensor, v: torch.Tensor, store_layer: KVLayer, layout: StepLayout
) -> None:
    """Writes the step's K and V into their slots (see `reference.kv_write`).

    Args:
        k: float32 [T, kv_heads, D].
        v: float32 [T, kv_heads, D].
        store_layer: Changed in place.
        layout: The step's slots.

    Raises:
        EngineError: Shapes do not match the store.
    """
    heads, dim = store_layer.k.shape[1], store_layer.head_dim
    tokens = layout.slot_mapping.shape[0]
    for name, values in (("k", k), ("v", v)):
        if tuple(values.shape) != (tokens, heads, dim):
            raise EngineError(
                f"{name} is {list(values.shape)}; expected [{tokens}, {heads}, {dim}]"
            )
    backend().kv_write(_rows(k), _rows(v), store_layer, layout)


def paged_attention(
    q: torch.Tensor,
    store_layer: KVLayer,
    layout: StepLayout,
    *,
    scale: float,
    window: int | None = None,
    alibi: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention over the paged store (see `reference.paged_attention`).

    Args:
        q: float32 [T, heads, D].
        store_layer: This step's own K and V are already in it.
        layout: The step's sequences.
        scale: Factor on the dot products.
        window: Keys that a query sees, itself included; None is all.
        alibi: float32 [heads, positions]; adds what stands at the key less what
            stands at the query.
        softcap: Scores become softcap * tanh(score / softcap).

    Returns:
        float32 [T, heads, D].

    Raises:
        EngineError: Shapes do not match the store.
    """
    kv_heads, dim = store_layer.k.shape[1], store_layer.head_dim
    tokens = layout.slot_mapping.shape[0]
    heads = q.shape[1] if q.dim() == 3 else 0
    if heads == 0 or q.shape[0] != tokens or q.shape[2] != dim or heads % kv_heads:
        raise EngineError(
            f"q is {list(q.shape)}; "
            f"expected [{tokens}, a multiple of {kv_heads}, {dim}]"
        )
    if alibi is not None:
        _check_alibi(alibi, heads, int(layout.context_length.max()))
    return backend().paged_attention(
        _rows(q),
        store_layer,
        layout,
        scale=scale,
        window=window,
        alibi=alibi,
        softcap=softcap,
    )


def _check_alibi(alibi: torch.Tensor, heads: int, positions: int) -> None:
    shape = list(alibi.shape)
    enough = len(shape) == 2 and shape[0] == heads and shape[1] >= positions
    if not enough or alibi.dtype != torch.float32 or not alibi.is_contiguous():
        raise EngineError(
            f"alibi is {alibi.dtype} {shape}; expected contiguous float32 "
            f"[{heads}, at least {positions}]"
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + epsilon) * weight.

    Args:
        x: float32 [..., N], any number of leading dimensions.
        weight: float32 [N].
        epsilon: Added to the mean square.

    Returns:
        float32, x's shape.
    """
    return backend().rms_norm(x, weight, epsilon)


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up.

    Args:
        gate_up: float32 [T, 2 * inner], gate in the first half of each row.

    Returns:
        float32 [T, inner].
    """
    return backend().silu_multiply(gate_up)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates every head in place: x * cos + swap_halves(x) * sin.

    Args:
        x: float32 [T, heads, D], heads contiguous; rows may be strided.
        cos: float32 [T, D].
        sin: float32 [T, D] with its first half negated.
    """
    backend().rotate(x, cos, sin)


def llama_layer(
    x: torch.Tensor,
    weights: LlamaLayerWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    store_layer: KVLayer,
    layout: StepLayout,
) -> None:
    """Runs one decoder layer of the llama pattern: x += attention, x += MLP.

    Same operations in the same order as the separate calls; with the C++ kernels it is
    one call, which matters when a step takes milliseconds.

    Args:
        x: float32 [T, hidden], contiguous, changed in place.
        weights: The layer, packed by the backend in force.
        cos: float32 [T, D], contiguous.
        sin: Same, its first half negated.
        store_layer: The layer's KV store, written and read.
        layout: The step's sequences.

    Raises:
        EngineError: x does not fit the layer.
    """
    hidden = weights.qkv.in_features
    tokens = layout.slot_mapping.shape[0]
    if tuple(x.shape) != (tokens, hidden) or not x.is_contiguous():
        raise EngineError(
            f"x is {list(x.shape)}; expected contiguous [{tokens}, {hidden}]"
        )
    backend().llama_layer(
        x, weights, cos.contiguous(), sin.contiguous(), store_layer, layout
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x with heads and elements contiguous; rows may be strided."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()
