"""Scales for keys and values from the weights alone, for models not calibrated.

A token's keys share one INT8 scale per head, so a channel that is always large, as
Qwen2's key biases make it, takes the levels from all others. Its size is known without
any text: the bias plus what rows of the weight make of normed inputs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from .folding import normed_heads
from .rank import heads_here, key_value_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ...parallel.shard import Shard

STRENGTH: Final = 0.75
"""Power of a channel's size that is divided out; 1 would favour small channels."""
_NAMES: Final = re.compile(
    r"layers\.(\d+)\.(?:self_attn\.)?"
    r"(input_layernorm|k_proj|v_proj|k_norm)\.(weight|bias)$"
)


def balanced(size: torch.Tensor) -> torch.Tensor:
    """Returns size ** STRENGTH, its geometric mean 1 in each head.

    Args:
        size: float32 [heads, channels], of typical or largest magnitude.
    """
    logarithm = STRENGTH * size.clamp_min(1e-8).log()
    return (logarithm - logarithm.mean(dim=-1, keepdim=True)).exp()


def pairwise(size: torch.Tensor) -> torch.Tensor:
    """Returns what RoPE can make of each pair of channels.

    Args:
        size: float32 [heads, head_dim].

    Returns:
        float32 [heads, head_dim / 2].
    """
    first, second = size.chunk(2, dim=-1)
    return torch.hypot(first, second)


def scales_from_weights(
    path: Path, config: PreTrainedConfig, shard: Shard | None = None
) -> dict[str, torch.Tensor]:
    """Returns key and value scales, named as in a calibration.

    Args:
        path: The checkpoint, of the llama pattern.
        config: Its configuration.
        shard: The rank whose KV heads are looked at; None is all of them.
    """
    parts: dict[tuple[int, str], torch.Tensor] = {}
    for name, tensor in key_value_tensors(path, config, shard, _NAMES):
        match = _NAMES.search(name)
        if match is not None:
            parts[int(match[1]), f"{match[2]}.{match[3]}"] = tensor.float()
    scales = {}
    for index in range(config.num_hidden_layers):
        norm = parts.get((index, "input_layernorm.weight"))
        heads = int(heads_here(config, shard).num_key_value_heads)
        if norm is None:
            continue  # the reader names what is missing
        for short, letter in (("key", "k"), ("value", "v")):
            weight = parts.get((index, f"{letter}_proj.weight"))
            if weight is None or weight.shape[-1] != norm.shape[0]:
                continue
            size = (weight * norm).square().sum(dim=1).sqrt()
            bias = parts.get((index, f"{letter}_proj.bias"))
            if bias is not None:
                size = size + bias.abs()
            size = size.view(heads, -1)
            if letter == "k":
                normed = parts.get((index, "k_norm.weight"))
                if normed_heads(config.model_type) and normed is not None:
                    size = normed.abs()[None]
                size = pairwise(size)
            scales[f"layers.{index}.{short}_scale"] = balanced(size)
    return scales
