"""What is done to a model's weights as they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from .folding import Fold, Scales

_LINEAR: Final = re.compile(r"^model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj$")
_MERGED: Final = {
    **dict.fromkeys(("q", "k", "v", "qkv"), "qkv"),
    **dict.fromkeys(("gate", "up", "gate_up"), "gate_up"),
    "o": "output",
    "down": "down",
}
_MODULES: Final = {
    "qkv": "self_attn.qkv_proj",
    "output": "self_attn.o_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}


def linear_key(name: str) -> str | None:
    """Returns a linear layer's name in a calibration, `layers.3.qkv` for example.

    Args:
        name: Dotted name in the model, merged or not.
    """
    if name == "lm_head":
        return "head"
    match = _LINEAR.match(name)
    if match is None or match[2] not in _MERGED:
        return None
    return f"layers.{match[1]}.{_MERGED[match[2]]}"


def module_name(key: str) -> str:
    """Returns the merged module that a key of a calibration names."""
    if key == "head":
        return "lm_head"
    layer, _, linear = key.rpartition(".")
    return f"model.{layer}.{_MODULES[linear]}"


@dataclass(frozen=True, slots=True)
class Tuning:
    """Factors on weights, means of inputs, and which layers keep two planes."""

    folds: Mapping[str, Fold] = field(default_factory=dict)
    """By the checkpoint's tensor names."""
    means: Scales = field(default_factory=dict)
    """By `linear_key`: what the layer sees on average, its scale folded in."""
    sensitive: frozenset[str] = frozenset()
    """By `linear_key`."""
    version: str = ""
    """Part of the weights' version; empty if nothing is changed."""
    source: str = "none"
    """For people."""

    def mean(self, name: str) -> torch.Tensor | None:
        """Returns the mean input of a layer, float32 [in_features]."""
        key = linear_key(name)
        return None if key is None else self.means.get(key)

    def is_sensitive(self, name: str) -> bool:
        """Returns whether a layer keeps a second plane."""
        return linear_key(name) in self.sensitive
