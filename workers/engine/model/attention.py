"""Paged attention behind transformers' AttentionInterface.

The model's own attention modules project and rotate; the function registered here
writes their keys and values into the paged store and attends over what is stored, this
step's tokens included. It finds the step through a `StepState` that hangs on each
attention module, so several models in one process do not meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from ....shared.errors import EngineError
from ..kernels import ops

if TYPE_CHECKING:
    from ..kernels.layout import KVLayer, StepLayout
    from ..kernels.protocol import OpsProtocol

IMPLEMENTATION: Final = "tokenmill_paged"
"""Name in the AttentionInterface."""
_STATE: Final = "tokenmill_state"


class StepState:
    """What attention needs beyond activations: the store, and the step that runs.

    Args:
        layers: The KV blocks of each layer.
        kernels: The operations of the device that holds them.
    """

    def __init__(self, layers: tuple[KVLayer, ...], kernels: OpsProtocol = ops) -> None:
        self.layers = layers
        self.kernels = kernels
        self.one_by_one = False
        """Whether the step calls each linear layer's module, where one call of the
        kernels could do a whole decoder layer."""
        self._layout: StepLayout | None = None
        self._rope_lengths: torch.Tensor | None = None

    def begin(self, layout: StepLayout, rope_lengths: torch.Tensor | None) -> None:
        """Opens a step; everything until `end` belongs to it."""
        self._layout = layout
        self._rope_lengths = rope_lengths

    def end(self) -> None:
        """Closes the step; attention outside of one is an error."""
        self._layout = None
        self._rope_lengths = None

    @property
    def layout(self) -> StepLayout:
        """The open step's layout."""
        if self._layout is None:
            raise EngineError("attention was called outside of a step")
        return self._layout

    @property
    def rope_lengths(self) -> torch.Tensor:
        """int64 [tokens] of the open step; only kept for length-dependent RoPE."""
        if self._rope_lengths is None:
            raise EngineError("the open step carries no sequence lengths for RoPE")
        return self._rope_lengths

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x in a type that the kernels take: a GPU's take half precision."""
        return x.float() if self.kernels is ops else x

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        alibi: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores k and v, then attends over the store.

        Args:
            layer: Index of the layer.
            q: [tokens, heads, head_dim], float32 (a GPU also takes half precision).
            k: [tokens, kv_heads, head_dim], likewise.
            v: As `k`.
            scale: Factor on the dot products.
            window: Keys that a query sees at most, its own included.
            alibi: float32 [heads, positions], each position's bias, or None.

        Returns:
            [tokens, heads, head_dim] in the type of `q`.
        """
        store, layout = self.layers[layer], self.layout
        self.kernels.kv_write(k, v, store, layout)
        return self.kernels.paged_attention(
            q, store, layout, scale=scale, window=window, alibi=alibi
        )


def attach(attention: nn.Module, state: StepState) -> None:
    """Lets an attention module's calls find the step."""
    setattr(attention, _STATE, state)


def register() -> None:
    """Makes the implementation known to transformers (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  (the interface passes it)
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_unused: object,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention modules call, with packed sequences.

    Args:
        module: The caller, with a state attached.
        query: [1, heads, tokens, head_dim], rotated.
        key: [1, kv_heads, tokens, head_dim], rotated.
        value: As `key`.
        attention_mask: Not used: causality is the kernel's.
        scaling: Factor on the dot products; None is head_dim ** -0.5.
        sliding_window: Keys that a query sees at most.

    Returns:
        [1, tokens, heads, head_dim] in the query's dtype, and no weights.
    """
    state: StepState = getattr(module, _STATE)
    layer: int = getattr(module, "layer_idx")  # noqa: B009  (typed as a module)
    q, k, v = (state.cast(part[0].transpose(0, 1)) for part in (query, key, value))
    out = state.attend(
        layer,
        q,
        k,
        v,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
    )
    return out.to(query.dtype)[None], None
