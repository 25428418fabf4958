"""The small operations of a decoder layer in torch, and the layer made of them.

Backends inherit this and replace what they do faster.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from .layout import KVLayer, PackedWeight, StepLayout


@dataclass(slots=True)
class LlamaLayerWeights:
    """One decoder layer of the llama pattern (llama, mistral, qwen2, qwen3)."""

    attention_norm: torch.Tensor
    """float32 [hidden]."""
    mlp_norm: torch.Tensor
    """float32 [hidden]."""
    qkv: PackedWeight
    """Rows: all query heads, all key heads, all value heads."""
    output: PackedWeight
    gate_up: PackedWeight
    """Rows: all of gate, then all of up."""
    down: PackedWeight
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    """Of every norm in the layer."""
    scale: float
    """Factor on the attention's dot products."""
    window: int | None = None
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    """float32 [head_dim]: each query head is normed before its rotation."""
    k_norm: torch.Tensor | None = None
    prepared: object = field(default=None, init=False, repr=False)
    """A backend's own form of this layer, made on first use."""


class Primitives(Protocol):
    """What the composed layer needs of a backend."""

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `reference.linear`."""
        ...

    def kv_write(
        self, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, layout: StepLayout
    ) -> None:
        """See `reference.kv_write`."""
        ...

    def paged_attention(
        self,
        q: torch.Tensor,
        layer: KVLayer,
        layout: StepLayout,
        *,
        scale: float,
        window: int | None,
        alibi: torch.Tensor | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `reference.paged_attention`."""
        ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """See `Composed.rms_norm`."""
        ...

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Composed.silu_multiply`."""
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """See `Composed.rotate`."""
        ...


class Composed:
    """Torch versions of the operations between the matrix products."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Returns x / sqrt(mean(x^2) + epsilon) * weight over the last dimension."""
        return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(first half) * second half of float32 [T, 2 * inner]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotates every head in place: x * cos + swap_halves(x) * sin.

        Args:
            x: float32 [T, heads, D].
            cos: float32 [T, D].
            sin: float32 [T, D], its first half negated.
        """
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        x.mul_(cos[:, None]).addcmul_(swapped, sin[:, None])

    def llama_layer(
        self: Primitives,
        x: torch.Tensor,
        weights: LlamaLayerWeights,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: KVLayer,
        layout: StepLayout,
    ) -> None:
        """Adds a decoder layer's result to x (see `ops.llama_layer`)."""
        w = weights
        both = w.heads + w.kv_heads
        normed = self.rms_norm(x, w.attention_norm, w.epsilon)
        fused = self.linear(normed, w.qkv, w.qkv_bias)
        fused = fused.view(len(x), both + w.kv_heads, w.head_dim)
        q, k, v = fused[:, : w.heads], fused[:, w.heads : both], fused[:, both:]
        if w.q_norm is not None:
            q.copy_(self.rms_norm(q, w.q_norm, w.epsilon))
        if w.k_norm is not None:
            k.copy_(self.rms_norm(k, w.k_norm, w.epsilon))
        self.rotate(fused[:, :both], cos, sin)
        self.kv_write(k, v, layer, layout)
        mixed = self.paged_attention(
            q,
            layer,
            layout,
            scale=w.scale,
            window=w.window,
            alibi=None,
            softcap=None,
        )
        x += self.linear(mixed.view(len(x), -1), w.output, w.output_bias)
        normed = self.rms_norm(x, w.mlp_norm, w.epsilon)
        inner = self.silu_multiply(self.linear(normed, w.gate_up, None))
        x += self.linear(inner, w.down, None)
