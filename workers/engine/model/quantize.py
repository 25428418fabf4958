"""Linear layers by precision. Each is made empty and filled from the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol

import torch
from torch import nn

from ....shared.errors import ModelLoadError
from ..kernels import ops
from ..kernels.reference import quantize_channels

if TYPE_CHECKING:
    from ..kernels.layout import PackedWeight

Weights = Literal[
    "int8", "float32", "bfloat16", "float16", "nf4", "int8-a8", "int8-bnb"
]

INT8_WEIGHTS: Final = frozenset({"int8", "int8-a8", "int8-bnb"})
"""What calibration of INT8 weights applies to."""
ACTIVATIONS = "int16"
"""Sixteen-bit activations need no calibration and cost practically no quality."""
_ROWS_AT_ONCE = 128
"""Rows of a weight handled together: their temporaries stay in cache."""


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


class EmptyLinear(nn.Module):
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

    def fill(self, weight: torch.Tensor) -> None:
        """Takes the weight, float [out_features, in_features]."""
        raise NotImplementedError

    def fill_bias(self, bias: torch.Tensor) -> None:
        """Keeps the bias as float32."""
        self.bias = bias.float().clone()

    def settle(self) -> None:
        """Lets go of what only filling needed; nothing is filled after it."""


class Int8Linear(EmptyLinear):
    """A linear layer with INT8 weights, each row of its input on its own.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        mean: float32 [in_features], what it sees on average. What rounding the weight
            does to that is taken off by the bias (Nagel et al. 2019).
        precise: Keep a second INT8 plane with what rounding left of the weight, which
            makes about 15 bits of the two, for twice the work.
    """

    packed: PackedWeight

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mean: torch.Tensor | None = None,
        precise: bool = False,
    ) -> None:
        super().__init__(in_features, out_features)
        self.residual: PackedWeight | None = None
        self._mean = mean
        self._precise = precise
        self._own_bias: torch.Tensor | None = None
        self._correction: torch.Tensor | None = None

    def fill(self, weight: torch.Tensor) -> None:
        """Quantizes and keeps the weight."""
        weight = weight.float()
        self.packed = ops.quantize_weight(weight, activations=ACTIVATIONS)
        if self._precise:
            left = rounding_residual(weight)
            self.residual = ops.quantize_weight(left, activations=ACTIVATIONS)
        if self._mean is not None:
            self._correction = self._lost_output(weight, self._mean)
            self._join_biases()

    def fill_bias(self, bias: torch.Tensor) -> None:
        """Keeps the bias as float32."""
        self._own_bias = bias.float().clone()
        self._join_biases()

    def settle(self) -> None:
        """Lets go of what the bias was made of."""
        self._mean = self._own_bias = self._correction = None

    def _join_biases(self) -> None:
        parts = [b for b in (self._own_bias, self._correction) if b is not None]
        self.bias = sum(parts[1:], start=parts[0])

    def _lost_output(self, weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Returns what rounding took from the average output, float32 [out]."""
        exact = torch.cat(
            [
                (weight[start : start + _ROWS_AT_ONCE].double() * mean).sum(dim=1)
                for start in range(0, len(weight), _ROWS_AT_ONCE)
            ]
        )
        return (exact - self._multiply(mean[None], None)[0].double()).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., in_features] into [..., out_features], float32."""
        rows = x.reshape(-1, self.in_features)
        out = self._multiply(rows, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def _multiply(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = ops.linear(rows, self.packed, bias)
        if self.residual is not None:
            out += ops.linear(rows, self.residual)
        return out


def rounding_residual(weight: torch.Tensor) -> torch.Tensor:
    """Returns what INT8 rounding leaves of a weight, float32 [N, K]."""
    left = torch.empty_like(weight)
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        q, scale = quantize_channels(weight[part])
        left[part] = weight[part] - q * scale[:, None]
    return left


class Nf4Linear(EmptyLinear):
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


class FloatLinear(EmptyLinear):
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
