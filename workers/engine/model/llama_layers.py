"""A decoder layer of the llama pattern: a single kernel, several, or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import nn

from ....shared.errors import EngineError
from ..kernels import ops
from ..kernels.composed import LlamaLayerWeights
from ..parallel.layers import SummedLinear, summed_part
from .quantize import EmptyLinear, Int8Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from .attention import StepState

VECTOR: Final = 64
"""Floats: a multiple of all that torch's loops take at once on any CPU."""


class _Weighted(Protocol):
    weight: torch.Tensor


class _Config(Protocol):
    hidden_act: str
    model_type: str
    num_key_value_heads: int
    rms_norm_eps: float
    sliding_window: int | None


class _Attention(Protocol):
    """What is read of transformers' attention modules of the llama pattern."""

    config: _Config
    head_dim: int
    num_key_value_groups: int
    scaling: float
    qkv_proj: nn.Module
    o_proj: nn.Module


class _Mlp(Protocol):
    gate_up_proj: nn.Module
    down_proj: nn.Module
    act_fn: Callable[[torch.Tensor], torch.Tensor]


class LayerModule(Protocol):
    """What is read of transformers' decoder layers of the llama pattern."""

    self_attn: _Attention
    mlp: _Mlp
    input_layernorm: _Weighted
    post_attention_layernorm: _Weighted


class TorchLayer:
    """One decoder layer in torch: the exact mode, and INT8 with another activation."""

    def __init__(self, module: LayerModule, index: int, state: StepState) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.index = index
        self.state = state
        self.attention_norm: torch.Tensor = module.input_layernorm.weight
        self.mlp_norm: torch.Tensor = module.post_attention_layernorm.weight
        self.qkv: nn.Module = attention.qkv_proj
        self.output: nn.Module = attention.o_proj
        self.gate_up: nn.Module = mlp.gate_up_proj
        self.down: nn.Module = mlp.down_proj
        self.activation = mlp.act_fn
        self.scale = float(attention.scaling)
        self.window = _window(attention)
        self.head_dim = int(attention.head_dim)
        self.kv_heads = _kv_heads(attention)
        self.heads = self.kv_heads * int(attention.num_key_value_groups)
        self.epsilon = float(attention.config.rms_norm_eps)
        self.q_norm = _weight_of(attention, "q_norm")
        self.k_norm = _weight_of(attention, "k_norm")

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Runs the layer on float32 [tokens, hidden]; returns the same shape."""
        x = x + self.output(self._attend(self._norm(x, self.attention_norm), cos, sin))
        gate, up = self.gate_up(self._norm(x, self.mlp_norm)).chunk(2, dim=-1)
        down: torch.Tensor = self.down(self._activated(gate) * up)
        return x + down

    def _activated(self, gate: torch.Tensor) -> torch.Tensor:
        """Applies the activation so that a row's place changes none of its bits.

        torch computes a tensor's last elements, and strided ones, by other code than
        those that fill vector registers. Padded to whole registers, no row has any.
        """
        width = gate.shape[-1]
        padded = nn.functional.pad(gate, (0, -width % VECTOR))
        return self.activation(padded.contiguous())[..., :width]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, weight.shape, weight, self.epsilon)

    def _attend(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        both = self.heads + self.kv_heads
        fused = self.qkv(x).view(len(x), both + self.kv_heads, self.head_dim)
        rotated = fused[:, :both]
        if self.q_norm is not None and self.k_norm is not None:
            rotated = torch.cat(
                (
                    self._norm(rotated[:, : self.heads], self.q_norm),
                    self._norm(rotated[:, self.heads :], self.k_norm),
                ),
                dim=1,
            )
        # sin carries the sign of the rotation, so swapping halves is enough.
        swapped = rotated.roll(self.head_dim // 2, dims=-1)
        rotated = torch.addcmul(rotated * cos[:, None], swapped, sin[:, None])
        out = self.state.attend(
            self.index,
            rotated[:, : self.heads],
            rotated[:, self.heads :],
            fused[:, both:],
            scale=self.scale,
            window=self.window,
        )
        return out.view(len(x), -1)


class SeparateLayer(TorchLayer):
    """One decoder layer on INT8 weights, some in two planes: kernels one by one."""

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Runs the layer on float32 [tokens, hidden]; returns the same shape."""
        x = x + self.output(self._attend(self._norm(x, self.attention_norm), cos, sin))
        inner = ops.silu_multiply(self.gate_up(self._norm(x, self.mlp_norm)))
        down: torch.Tensor = self.down(inner)
        return x + down

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, weight, self.epsilon)


class ApartLayer(SeparateLayer):
    """One decoder layer on INT8 weights, with the bits of `KernelLayer`.

    Its linear layers are called as modules: adapters hang on those, and ranks meet.
    """

    def _attend(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        both = self.heads + self.kv_heads
        fused = self.qkv(x).view(len(x), both + self.kv_heads, self.head_dim)
        q, k, v = fused[:, : self.heads], fused[:, self.heads : both], fused[:, both:]
        if self.q_norm is not None and self.k_norm is not None:
            q.copy_(self._norm(q, self.q_norm))
            k.copy_(self._norm(k, self.k_norm))
        ops.rotate(fused[:, :both], cos, sin)
        out = self.state.attend(
            self.index, q, k, v, scale=self.scale, window=self.window
        )
        return out.view(len(x), -1)


class KernelLayer:
    """One decoder layer on INT8 weights: a single call of the kernels."""

    def __init__(self, module: LayerModule, index: int, state: StepState) -> None:
        attention, mlp = module.self_attn, module.mlp
        kv_heads = int(attention.config.num_key_value_heads)
        qkv, output = _int8(attention.qkv_proj), _int8(attention.o_proj)
        self._state = state
        self._store = state.layers[index]
        self._weights = LlamaLayerWeights(
            attention_norm=module.input_layernorm.weight,
            mlp_norm=module.post_attention_layernorm.weight,
            qkv=qkv.packed,
            output=output.packed,
            gate_up=_int8(mlp.gate_up_proj).packed,
            down=_int8(mlp.down_proj).packed,
            heads=kv_heads * int(attention.num_key_value_groups),
            kv_heads=kv_heads,
            head_dim=int(attention.head_dim),
            epsilon=float(attention.config.rms_norm_eps),
            scale=float(attention.scaling),
            window=_window(attention),
            qkv_bias=qkv.bias,
            output_bias=output.bias,
            q_norm=_weight_of(attention, "q_norm"),
            k_norm=_weight_of(attention, "k_norm"),
        )

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Runs the layer in place on float32 [tokens, hidden]; returns x."""
        layout = self._state.layout
        ops.llama_layer(x, self._weights, cos, sin, self._store, layout)
        return x


def layer_class(
    module: LayerModule,
) -> type[KernelLayer | SeparateLayer | TorchLayer]:
    """Returns what computes a module: one kernel, several, or torch.

    Args:
        module: With merged projections, filled.
    """
    attention, mlp = module.self_attn, module.mlp
    split = isinstance(attention.o_proj, SummedLinear)
    linears = (
        attention.qkv_proj,
        summed_part(attention.o_proj),
        mlp.gate_up_proj,
        summed_part(mlp.down_proj),
    )
    quantized = [linear for linear in linears if isinstance(linear, Int8Linear)]
    if len(quantized) < len(linears) or attention.config.hidden_act != "silu":
        return TorchLayer
    if any(linear.bias is not None for linear in quantized[2:]):
        return TorchLayer
    if split:  # one kernel cannot meet the other ranks in its midst
        return ApartLayer
    one_plane = all(linear.residual is None for linear in quantized)
    return KernelLayer if one_plane else SeparateLayer


def _kv_heads(attention: _Attention) -> int:
    """Returns how many KV heads the projection makes: a rank has some of them."""
    if not isinstance(attention.qkv_proj, EmptyLinear):
        raise EngineError("the query, key and value projections are not merged")
    heads = attention.qkv_proj.out_features // int(attention.head_dim)
    return heads // (int(attention.num_key_value_groups) + 2)


def _int8(linear: nn.Module) -> Int8Linear:
    if not isinstance(linear, Int8Linear):
        raise EngineError(f"a {type(linear).__name__} cannot be run as INT8")
    return linear


def _weight_of(attention: _Attention, name: str) -> torch.Tensor | None:
    """Returns the weight of a norm that only some families have."""
    norm: _Weighted | None = getattr(attention, name, None)
    return None if norm is None else norm.weight


def _window(attention: _Attention) -> int | None:
    """Returns the layer's sliding window as its own modules would apply it."""
    if attention.config.model_type == "mistral":
        return attention.config.sliding_window
    window: int | None = getattr(attention, "sliding_window", None)  # qwen, by layer
    return window
