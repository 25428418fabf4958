"""RoPE for packed sequences, and how far each scaling reaches.

Most scalings give every position one fixed angle, and transformers' own module serves
packed positions as it is. "dynamic" and "longrope" choose their frequencies by the
length of the sequence. transformers looks at the longest position of the call, which in
a packed step belongs to somebody else; here each token looks at its own sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..batch import StepBatch
    from .attention import StepState

LENGTH_DEPENDENT: Final = frozenset({"dynamic", "longrope"})
"""Scalings whose frequencies depend on the sequence's length."""
STRETCHING: Final = frozenset({"linear", "dynamic"})
"""Scalings that multiply `max_position_embeddings` by their factor."""


def rope_type(config: PreTrainedConfig) -> str | None:
    """Returns the scaling's name, "default" for none, or None without RoPE."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return None
    return str(parameters.get("rope_type", "default"))


def context_limit(config: PreTrainedConfig) -> int:
    """Returns the longest sequence in tokens that the configuration allows for."""
    limit = int(config.max_position_embeddings)
    kind = rope_type(config)
    if kind is None:
        return limit
    factor = config.rope_parameters.get("factor")
    if factor is None:
        return limit
    if kind in STRETCHING:
        return int(limit * factor)
    if kind == "yarn":
        original = config.rope_parameters.get("original_max_position_embeddings", limit)
        return max(limit, int(original * factor))
    return limit


def rope_lengths(batch: StepBatch) -> torch.Tensor:
    """Returns for each packed token the length its frequencies are chosen for.

    A prompt's tokens share the prompt's length and an output token has its own, as
    when `generate` runs the sequence alone; chunk borders change nothing.

    Args:
        batch: The packed step.

    Returns:
        int64 [tokens].
    """
    prompts = np.repeat(
        np.array([piece.prompt_length for piece in batch.slices], dtype=np.int64),
        np.array([piece.query_length for piece in batch.slices], dtype=np.int64),
    )
    return torch.from_numpy(np.maximum(batch.positions + 1, prompts))


class RotaryModule(Protocol):
    """What is read of transformers' rotary modules."""

    config: PreTrainedConfig
    attention_scaling: float
    original_inv_freq: torch.Tensor


class PackedRotary(nn.Module):
    """Stands in for a model's rotary module when frequencies depend on the length.

    Args:
        original: transformers' module for the same configuration.
        state: Tells each token's length during a step.
    """

    def __init__(self, original: RotaryModule, state: StepState) -> None:
        super().__init__()
        config = original.config
        self._config = config
        self._state = state
        self._kind = rope_type(config)
        self._scaling = float(original.attention_scaling)
        self._short: torch.Tensor = original.original_inv_freq.float().cpu()
        parameters = config.rope_parameters
        if self._kind == "longrope":
            self._border = int(parameters["original_max_position_embeddings"])
            self._long = self._frequencies(self._border + 1)
        else:
            self._border = int(config.max_position_embeddings)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines for packed tokens.

        Args:
            x: Gives the dtype alone.
            position_ids: int64 [1, tokens].

        Returns:
            Two tensors [1, tokens, rotary dimensions].
        """
        lengths = self._state.rope_lengths
        # Chosen on the host, where the lengths are: the device need not be awaited.
        frequencies = self._by_length(lengths).to(position_ids.device)
        angles = position_ids[..., None].float() * frequencies
        both = torch.cat((angles, angles), dim=-1)
        cos = both.cos() * self._scaling
        sin = both.sin() * self._scaling
        return cos.to(x.dtype), sin.to(x.dtype)

    def _by_length(self, lengths: torch.Tensor) -> torch.Tensor:
        """Returns float32 [tokens, dimensions / 2]."""
        beyond = lengths > self._border
        if not bool(beyond.any()):
            return self._short
        if self._kind == "longrope":
            return torch.where(beyond[:, None], self._long, self._short)
        frequencies = self._short.expand(len(lengths), -1).clone()
        for length in torch.unique(lengths[beyond]).tolist():
            frequencies[lengths == length] = self._frequencies(length)
        return frequencies

    def _frequencies(self, length: int) -> torch.Tensor:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        compute = ROPE_INIT_FUNCTIONS[self._kind]
        # A tensor, as transformers passes it: a number would be computed in float64.
        frequencies, _ = compute(
            self._config, torch.device("cpu"), seq_len=torch.tensor(length)
        )
        result: torch.Tensor = frequencies.float()
        return result
