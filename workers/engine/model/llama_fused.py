"""The llama pattern as one loop: llama, mistral, qwen2, qwen3.

transformers' modules cost some 25 ms of Python a step on a CPU. Here q, k and v are one
projection, gate and up another, and a layer of INT8 weights is a single call of the
kernels. The exact mode runs the same loop in torch. Parity tests hold both against the
modules and against `generate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..kernels import ops
from .llama_layers import ApartLayer, KernelLayer, layer_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from .attention import StepState
    from .placing import Groups


def merged_layers(num_layers: int) -> Groups:
    """Returns which projections of a llama-pattern model share an input."""
    groups: dict[str, tuple[str, ...]] = {}
    for index in range(num_layers):
        attention = f"model.layers.{index}.self_attn"
        mlp = f"model.layers.{index}.mlp"
        groups[f"{attention}.qkv_proj"] = tuple(
            f"{attention}.{part}_proj" for part in "qkv"
        )
        groups[f"{mlp}.gate_up_proj"] = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    return groups


class FusedLlamaDecoder:
    """Runs all layers of a llama-pattern model on packed tokens.

    Args:
        model: With merged projections in place (`merged_layers`).
        state: The store and the running step.
        count_rows: Told the rows that enter the first layer's first product.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        state: StepState,
        count_rows: Callable[[int], None],
    ) -> None:
        base = model.base_model
        self._embed: nn.Module = base.embed_tokens
        self._rotary: nn.Module = base.rotary_emb
        self._norm: torch.Tensor = base.norm.weight
        self._epsilon = float(model.config.rms_norm_eps)
        self._count_rows = count_rows
        self._kernels = state.kernels
        self._layers = [
            layer_class(layer)(layer, index, state)
            for index, layer in enumerate(base.layers)
        ]
        self._state = state
        self._apart = [
            ApartLayer(module, index, state)
            if isinstance(layer, KernelLayer)
            else layer
            for index, (layer, module) in enumerate(
                zip(self._layers, base.layers, strict=True)
            )
        ]
        """The same for a step in which something hangs on the linear layers."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Returns the final hidden states.

        Args:
            token_ids: int64 [tokens], packed.
            positions: int64 [tokens], each in its own sequence.

        Returns:
            [tokens, hidden] in the activations' type, after the last norm.
        """
        x = self._embed(token_ids)
        cos, sin = self._rotary(x, positions[None])
        cos, sin = cos[0].contiguous(), sin[0].clone()
        sin[:, : sin.shape[-1] // 2].neg_()
        self._count_rows(len(x))
        for layer in self._apart if self._state.one_by_one else self._layers:
            x = layer(x, cos, sin)
        if self._kernels is ops:
            return ops.rms_norm(x, self._norm, self._epsilon)
        return nn.functional.rms_norm(x, self._norm.shape, self._norm, self._epsilon)
