"""What calibration found for one model: scales, input means, sensitive layers.

Everything in it is folded into the weights as they are read, so it costs nothing at run
time, except that the few layers named as sensitive keep a second INT8 plane.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

FORMAT: Final = 1
"""Of the file; raised when the meaning of what is stored changes."""


class LayerLoss(msgspec.Struct, frozen=True):
    """What rounding one linear layer to INT8 costs."""

    name: str
    """Dotted, as in the model with merged projections."""
    loss_percent: float
    """Estimated rise of perplexity from this layer alone, in percent."""
    parameters: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a calibration comes from and what it expects."""

    fingerprint: str
    """Of the weights that it belongs to (`fingerprint.py`)."""
    text: str
    """Name of the calibration text."""
    samples: int
    tokens: int
    sensitive: tuple[LayerLoss, ...] = ()
    """Layers that keep a second INT8 plane, the costliest first."""
    loss_percent: float = 0.0
    """Estimated rise of perplexity from all other linear layers and the head."""
    plain_loss_percent: float = 0.0
    """The same without calibration."""
    format: int = FORMAT


@dataclass(frozen=True)
class Calibration:
    """A calibration in memory.

    Tensors are float32 by name; `layers.<i>` stands for a decoder layer:

    - `layers.<i>.key_scale` [kv_heads or 1, head_dim / 2]: one factor for both
      channels of a pair that RoPE rotates.
    - `layers.<i>.value_scale` [kv_heads, head_dim].
    - `layers.<i>.<linear>.input_scale` [in_features], for qkv, gate_up and down.
    - `layers.<i>.<linear>.input_mean` [in_features], for qkv and output.
    - `head.input_scale`, `head.input_mean` [hidden].
    """

    facts: Facts
    tensors: Mapping[str, torch.Tensor] = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """Names the content; part of the weights' version, as it changes tokens."""
        # Sorted: the order of a set of names differs from process to process.
        digest = hashlib.sha256(repr(sorted(self.sensitive_names)).encode())
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].contiguous().numpy().tobytes())
        return digest.hexdigest()[:12]

    @property
    def sensitive_names(self) -> frozenset[str]:
        """Names of the layers that keep a second plane."""
        return frozenset(layer.name for layer in self.facts.sensitive)


def calibration_facts(path: Path) -> dict[str, Any]:
    """Returns what `tokenmill inspect` tells of a model's calibration.

    Args:
        path: A checkpoint directory.

    Returns:
        Plain values: source, text, samples, estimated losses in percent and the
        sensitive layers.
    """
    from .files import find_calibration

    found = find_calibration(path)
    if found.calibration is None:
        return {"source": found.source, "sensitive_layers": []}
    facts = found.calibration.facts
    return {
        "source": found.source,
        "text": facts.text,
        "samples": facts.samples,
        "tokens": facts.tokens,
        "estimated_loss_percent": round(facts.loss_percent, 4),
        "estimated_loss_percent_without": round(facts.plain_loss_percent, 4),
        "sensitive_layers": [
            f"{layer.name} ({layer.loss_percent:.4f} %)" for layer in facts.sensitive
        ],
    }
