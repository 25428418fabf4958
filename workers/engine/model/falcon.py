"""Falcon's attention: transformers' own does not go through the AttentionInterface."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from .attention import StepState
from .rope import context_limit

if TYPE_CHECKING:
    from transformers import FalconConfig


class FalconAttention(Protocol):
    """What is read of transformers' module."""

    config: FalconConfig
    query_key_value: nn.Module
    dense: nn.Module
    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inv_norm_factor: float
    new_decoder_architecture: bool
    multi_query: bool


class PagedFalconAttention(nn.Module):
    """Takes the place of FalconAttention, with its projections, over the paged store.

    Covers multi-head, multi-query and grouped-query Falcons, rotary or ALiBi. Keys and
    values are stored once per KV head, where the original repeats them for every head.

    Args:
        original: The FalconAttention to replace; its projections are shared.
        state: The store and the running step.
        first_head: Of the whole model's query heads, where a rank has some of them.
    """

    def __init__(
        self, original: FalconAttention, state: StepState, *, first_head: int = 0
    ) -> None:
        super().__init__()
        self.query_key_value = original.query_key_value
        self.dense = original.dense
        self._state = state
        self._layer = int(original.layer_idx)
        self._heads = int(original.num_heads)
        self._head_dim = int(original.head_dim)
        self._kv_heads = int(original.num_kv_heads)
        self._grouped = bool(original.new_decoder_architecture or original.multi_query)
        self._scale = float(original.inv_norm_factor)
        self._alibi: torch.Tensor | None = None
        if original.config.alibi:
            every = int(original.config.num_attention_heads)
            limit = context_limit(original.config)
            table = alibi_bias(every, limit, self._head_dim)
            self._alibi = table[first_head : first_head + self._heads]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_unused: object,
    ) -> tuple[torch.Tensor, None]:
        """Returns [1, tokens, hidden] for packed tokens, and no weights.

        Args:
            hidden_states: [1, tokens, hidden], normed.
            position_embeddings: Cosines and sines [1, tokens, head_dim].
        """
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        q, k, v = self._split(self.query_key_value(hidden_states)[0])
        if self._alibi is None and position_embeddings is not None:
            cos, sin = (part[0] for part in position_embeddings)
            q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
        out = self._state.attend(
            self._layer,
            self._state.cast(q),
            self._state.cast(k),
            self._state.cast(v),
            scale=self._scale,
            alibi=self._biases(q.device),
        )
        merged = out.reshape(1, out.shape[0], -1).to(hidden_states.dtype)
        return self.dense(merged), None

    def _biases(self, device: torch.device) -> torch.Tensor | None:
        """Returns the table of biases on the device of the queries."""
        if self._alibi is not None and self._alibi.device != device:
            self._alibi = self._alibi.to(device)
        return self._alibi

    def _split(
        self, fused: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cuts [tokens, features] into q, k and v, each [tokens, heads, head_dim]."""
        tokens = fused.shape[0]
        if self._grouped:  # per KV head: its queries, then its key, then its value
            parts = fused.view(tokens, self._kv_heads, -1, self._head_dim)
            q, k, v = parts[:, :, :-2], parts[:, :, -2], parts[:, :, -1]
            return q.reshape(tokens, self._heads, self._head_dim), k, v
        parts = fused.view(tokens, self._heads, 3, self._head_dim)
        return parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]


@functools.lru_cache(maxsize=1)
def alibi_bias(heads: int, positions: int, head_dim: int) -> torch.Tensor:
    """Returns ALiBi's bias of each key, float32 [heads, positions].

    transformers multiplies slope and position in bfloat16, which moves a far key's
    bias by more than 0.1; its own function gives the same numbers. One table serves
    all layers.

    Args:
        heads: Query heads.
        positions: The longest context.
        head_dim: Its root divides the scores, and the biases with them.
    """
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    mask = torch.ones((1, positions), dtype=torch.int64)
    bias: torch.Tensor = build_alibi_tensor(mask, heads, torch.float32)
    return bias.view(heads, positions) / math.sqrt(head_dim)
