"""INT8 linear layers on a GPU: 8-bit rows with outlier columns, or 16-bit rows.

Rows are quantized one by one and outlier columns are static, so that a request's
numbers do not depend on its batch mates. Nothing waits for the device or looks at a
value, so that the layers can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...kernels.layout import PackedWeight
from ...kernels.protocol import OpsProtocol
from ...kernels.reference import quantize_channels
from ...kernels.triton.linear import rescale
from ...kernels.triton.ops import Int8Matmul
from ...kernels.triton.quantize import quantize_rows
from .device_linear import DeviceLinear, OutlierLinear, Place

_ROWS_AT_ONCE = 1024
"""Rows of a weight that are float64 at a time: a whole head would take gigabytes."""


class DeviceInt8Linear(OutlierLinear):
    """INT8 weights, 8-bit rows and static outlier columns in full precision.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        place: Device, home and type.
        outlier_columns: Inputs, found by calibration, that are not quantized.
        matmul: The product; one `MeasuredMatmul` is shared by a model's layers.

    Raises:
        EngineError: An outlier column does not exist.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        place: Place,
        *,
        outlier_columns: Iterable[int] = (),
        matmul: Int8Matmul,
    ) -> None:
        super().__init__(in_features, out_features, place, outlier_columns)
        self.matmul = matmul

    def fill(self, weight: torch.Tensor) -> None:
        """Quantizes and keeps the weight."""
        values, scale = quantize_channels(self.without_outliers(weight))
        self.keep("weight", values)
        self.keep("weight_scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes x @ weight.T + bias, each row alone.

        Args:
            x: [..., in_features], float32 or half precision.

        Returns:
            [..., out_features] in the type of `x`.
        """
        rows, outliers = self.rows(x), self.outlier_columns
        kept = rows.index_fill(1, outliers, 0.0) if len(outliers) else rows
        values, scale = quantize_rows(kept, "int8")
        out = rescale(
            self.matmul(values, self.weight),
            rows,
            scale,
            self.weight_scale,
            bias=self.bias,
            outlier_columns=outliers if len(outliers) else None,
            outlier_weight=self.outlier_weight if len(outliers) else None,
        )
        return self.shaped(out, x)


class WideInt8Linear(DeviceLinear):
    """INT8 weights and 16-bit rows: practically exact, and needs no calibration.

    It multiplies twice where `DeviceInt8Linear` multiplies once. Its numbers are those
    of the CPU's `Int8Linear`, and so is its quality.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        place: Device, home and type.
        kernels: The device's operations.
        mean: float32 [in_features], what it sees on average; the bias takes off what
            rounding the weight does to that.
        precise: Keep a second INT8 plane with what rounding left of the weight.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        place: Place,
        kernels: OpsProtocol,
        *,
        mean: torch.Tensor | None = None,
        precise: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, place)
        self._kernels = kernels
        self._mean = mean
        self._planes = ["weight", "weight_left"] if precise else ["weight"]
        self._own_bias: torch.Tensor | None = None
        self._correction: torch.Tensor | None = None

    def fill(self, weight: torch.Tensor) -> None:
        """Quantizes and keeps the weight."""
        left = self.arriving(weight)
        mean = None if self._mean is None else self._mean.to(left.device).double()
        lost = None if mean is None else _averages(left, mean)
        for plane in self._planes:
            values, scale = quantize_channels(left)
            self.keep(plane, values)
            self.keep(f"{plane}_scale", scale)
            left = left - values * scale[:, None]
            if lost is not None and mean is not None:
                lost = lost - _averages(values, mean) * scale
        self._correction = None if lost is None else lost.float()
        self._join_biases()

    def fill_bias(self, bias: torch.Tensor) -> None:
        """Keeps the bias beside what corrects the weight."""
        self._own_bias = bias.to(self.place.device, torch.float32, copy=True)
        self._join_biases()

    def settle(self) -> None:
        """Lets go of what the bias was made of."""
        self._mean = self._own_bias = self._correction = None

    def _join_biases(self) -> None:
        parts = [b for b in (self._own_bias, self._correction) if b is not None]
        if parts:
            self.keep("bias", sum(parts[1:], start=parts[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., in_features] into [..., out_features], in x's type."""
        rows = self.rows(x)
        out = self._kernels.linear(rows, self._packed("weight"), self.bias)
        for plane in self._planes[1:]:
            out = out + self._kernels.linear(rows, self._packed(plane))
        return self.shaped(out, x)

    def _packed(self, plane: str) -> PackedWeight:
        return PackedWeight(
            self.get_buffer(plane),
            self.get_buffer(f"{plane}_scale"),
            self.out_features,
            self.in_features,
            "int16",
            "triton",
        )


def _averages(weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Returns weight @ mean as float64 [rows], some rows at a time.

    Args:
        weight: [rows, in_features], float32 or int8.
        mean: float64 [in_features].
    """
    starts = range(0, len(weight), _ROWS_AT_ONCE)
    return torch.cat([weight[s : s + _ROWS_AT_ONCE].double() @ mean for s in starts])
