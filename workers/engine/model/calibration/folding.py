"""Folds scales into weights so that the float model computes the same as before.

A scale s on a linear layer's inputs multiplies its columns and divides whatever made
those inputs: the norm before it, or the rows of the layer before it. Keys are divided
and queries multiplied, one factor for both channels that RoPE rotates together; values
are divided and the output projection multiplied. The idea is SmoothQuant's (Xiao et al.
2023) and AWQ's (Lin et al. 2024); for keys, QServe's SmoothAttention (Lin et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

Scales = Mapping[str, torch.Tensor]
"""By name, as in `calibration.Calibration`."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Factors on one tensor of a checkpoint."""

    rows: torch.Tensor | None = None
    """float32 [out_features], or [width] for a norm or a bias."""
    columns: torch.Tensor | None = None
    """float32 [in_features]."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the scaled tensor as float32."""
        scaled = tensor.float()
        if self.columns is not None:
            scaled = scaled * self.columns
        if self.rows is not None:
            scaled = scaled * (self.rows[:, None] if scaled.dim() == 2 else self.rows)
        return scaled


class Shape(Protocol):
    """What is read of a llama-pattern configuration."""

    model_type: str
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int


def normed_heads(model_type: str) -> bool:
    """Returns whether a family norms each query and key head before rotating it."""
    return model_type == "qwen3"


def powers_of_two(scales: Scales) -> dict[str, torch.Tensor]:
    """Returns scales rounded to powers of two; means stay as they are.

    A norm or a weight in half precision is then divided without rounding, so that the
    columns that carry the scale still cancel it exactly.

    Args:
        scales: All positive, float32.
    """
    rounded = {}
    for name, values in scales.items():
        if name.endswith("_scale"):
            fraction, exponent = torch.frexp(values)  # fraction in [0.5, 1)
            exponent = torch.where(fraction < math.sqrt(0.5), exponent - 1, exponent)
            rounded[name] = torch.ldexp(torch.ones_like(values), exponent)
        else:
            rounded[name] = values
    return rounded


class _Folds:
    """Collects factors by tensor name."""

    def __init__(self) -> None:
        self._rows: dict[str, torch.Tensor] = {}
        self._columns: dict[str, torch.Tensor] = {}

    def rows(self, name: str, factor: torch.Tensor) -> None:
        """Multiplies a layer's rows and its bias, or a norm."""
        for tensor in (f"{name}.weight", f"{name}.bias"):
            before = self._rows.get(tensor)
            self._rows[tensor] = factor if before is None else before * factor

    def columns(self, name: str, factor: torch.Tensor) -> None:
        """Multiplies a layer's columns."""
        self._columns[f"{name}.weight"] = factor

    def finished(self) -> dict[str, Fold]:
        names = self._rows.keys() | self._columns.keys()
        return {n: Fold(self._rows.get(n), self._columns.get(n)) for n in names}


def make_folds(
    config: Shape, scales: Scales, *, inputs: bool, head: bool = True
) -> dict[str, Fold]:
    """Returns the factors by the checkpoint's tensor names.

    Args:
        config: Of a llama-pattern model.
        scales: Those that are absent stay 1.
        inputs: Fold the linear layers' input scales too, not only those of K and V.
        head: Among them the head's; impossible while it shares the embedding's tensor.
    """
    folds = _Folds()
    for index in range(config.num_hidden_layers):
        _fold_attention(folds, config, scales, index)
        if inputs:
            _fold_inputs(folds, scales, index)
    scale = scales.get("head.input_scale")
    if inputs and head and scale is not None:
        folds.rows("model.norm", 1 / scale)
        folds.columns("lm_head", scale)
    return folds.finished()


def _fold_attention(folds: _Folds, config: Shape, scales: Scales, index: int) -> None:
    attention = f"model.layers.{index}.self_attn"
    group = config.num_attention_heads // config.num_key_value_heads
    key = scales.get(f"layers.{index}.key_scale")
    if key is not None:
        both = torch.cat((key, key), dim=-1)
        if normed_heads(config.model_type):
            folds.rows(f"{attention}.q_norm", both[0])
            folds.rows(f"{attention}.k_norm", 1 / both[0])
        else:
            folds.rows(f"{attention}.q_proj", both.repeat_interleave(group, 0).ravel())
            folds.rows(f"{attention}.k_proj", 1 / both.ravel())
    value = scales.get(f"layers.{index}.value_scale")
    if value is not None:
        folds.rows(f"{attention}.v_proj", 1 / value.ravel())
        folds.columns(f"{attention}.o_proj", value.repeat_interleave(group, 0).ravel())


def _fold_inputs(folds: _Folds, scales: Scales, index: int) -> None:
    layer = f"model.layers.{index}"
    qkv = scales.get(f"layers.{index}.qkv.input_scale")
    if qkv is not None:
        folds.rows(f"{layer}.input_layernorm", 1 / qkv)
        for part in "qkv":
            folds.columns(f"{layer}.self_attn.{part}_proj", qkv)
    gate_up = scales.get(f"layers.{index}.gate_up.input_scale")
    if gate_up is not None:
        folds.rows(f"{layer}.post_attention_layernorm", 1 / gate_up)
        folds.columns(f"{layer}.mlp.gate_proj", gate_up)
        folds.columns(f"{layer}.mlp.up_proj", gate_up)
    down = scales.get(f"layers.{index}.down.input_scale")
    if down is not None:
        folds.rows(f"{layer}.mlp.up_proj", 1 / down)
        folds.columns(f"{layer}.mlp.down_proj", down)
