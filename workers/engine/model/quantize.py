"""Linear layers by precision. Each is made empty and filled from the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import nn

from ....shared.errors import ModelLoadError
from ..kernels import ops

if TYPE_CHECKING:
    from ..kernels.layout import PackedWeight

Weights = Literal["int8", "float32", "bfloat16", "nf4"]

ACTIVATIONS = "int16"
"""Sixteen-bit activations need no calibration and cost practically no quality."""


class LinearSlot(Protocol):
    """A linear layer that is waiting for its weight."""

    in_features: int
    out_features: int

    def fill(self, weight: torch.Tensor) -> None:
        """Takes the weight, float [out_features, in_features]."""
        ...

    def fill_bias(self, bias: torch.Tensor) -> None:
        """Takes the bias, float [out_features]."""
        ...


class _Empty(nn.Module):
    """What every such layer has: its widths, and a bias once one was read.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bias: torch.Tensor | None = None

    def fill_bias(self, bias: torch.Tensor) -> None:
        """Keeps the bias as float32."""
        self.bias = bias.float().clone()


class Int8Linear(_Empty):
    """A linear layer with INT8 weights, each row of its input on its own.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
    """

    packed: PackedWeight

    def fill(self, weight: torch.Tensor) -> None:
        """Quantizes and keeps the weight."""
        self.packed = ops.quantize_weight(weight.float(), activations=ACTIVATIONS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., in_features] into [..., out_features], float32."""
        rows = x.reshape(-1, self.in_features)
        out = ops.linear(rows, self.packed, self.bias)
        return out.view(*x.shape[:-1], self.out_features)


class Nf4Linear(_Empty):
    """A linear layer with 4-bit NormalFloat weights by bitsandbytes, double quantized.

    bitsandbytes runs it on any device; on a CPU it is slow.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.inner: nn.Module | None = None

    def fill(self, weight: torch.Tensor) -> None:
        """Quantizes and keeps the weight."""
        import bitsandbytes

        layer = bitsandbytes.nn.Linear4bit(
            self.in_features,
            self.out_features,
            bias=False,
            compute_dtype=torch.float32,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        layer.weight = bitsandbytes.nn.Params4bit(
            weight.float().contiguous(),
            requires_grad=False,
            compress_statistics=True,
            quant_type="nf4",
        )
        self.inner = layer.to("cpu")  # quantizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., in_features] into [..., out_features]."""
        if self.inner is None:
            raise ModelLoadError("a 4-bit layer was used before its weight was read")
        out: torch.Tensor = self.inner(x)
        return out if self.bias is None else out + self.bias


class FloatLinear(_Empty):
    """A linear layer with float32 weights, for the fused decoder's exact mode.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.weight: torch.Tensor | None = None

    def fill(self, weight: torch.Tensor) -> None:
        """Keeps the weight as float32."""
        self.weight = weight.float().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., in_features] into [..., out_features]."""
        if self.weight is None:
            raise ModelLoadError("a linear layer was used before its weight was read")
        return nn.functional.linear(x, self.weight, self.bias)
