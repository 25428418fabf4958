"""Linear layers by bitsandbytes: INT8 (`Linear8bitLt`) and NF4 (`Linear4bit`).

bitsandbytes runs them on any device; on a CPU they are slow.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .....shared.errors import ModelLoadError
from .device_linear import DeviceLinear, OutlierLinear, Place


class BitsAndBytesInt8Linear(OutlierLinear):
    """`Linear8bitLt` with static outlier columns, or with its own dynamic threshold.

    At a threshold of 0 each row is quantized by its own largest value, and the outlier
    columns that calibration found are multiplied apart, one after the other. Above 0
    bitsandbytes looks in each call for columns with a value beyond the threshold, over
    all rows: one request's outliers then change the numbers of its batch mates, so
    that results depend on the batch.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        place: Device and type; weights stay on the device.
        outlier_columns: Inputs that are not quantized; only at a threshold of 0.
        threshold: bitsandbytes' own, 0 for none; 6 is its authors' choice.

    Raises:
        EngineError: An outlier column does not exist.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        place: Place,
        *,
        outlier_columns: Iterable[int] = (),
        threshold: float = 0.0,
    ) -> None:
        super().__init__(in_features, out_features, place, outlier_columns)
        if threshold > 0:  # the library finds its own, in each call
            self.keep("outlier_columns", self.outlier_columns[:0])
        # On the host: a loop over a device's tensor would wait for it at each column.
        self._columns: list[int] = self.outlier_columns.tolist()
        self._threshold = threshold
        self.inner: nn.Module | None = None

    def fill(self, weight: torch.Tensor) -> None:
        """Quantizes and keeps the weight."""
        import bitsandbytes

        full = self.without_outliers(weight)
        layer = bitsandbytes.nn.Linear8bitLt(
            self.in_features,
            self.out_features,
            bias=False,
            has_fp16_weights=False,
            threshold=self._threshold,
            device="meta",
        )
        layer.weight = bitsandbytes.nn.Int8Params(
            full.cpu(), requires_grad=False, has_fp16_weights=False
        )
        self.inner = layer.to(self.place.device).eval()  # quantizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., in_features] into [..., out_features], in x's type."""
        rows = self.rows(x)
        # bitsandbytes quantizes from float16, and warns on each call that does not.
        half = rows.index_fill(1, self.outlier_columns, 0.0) if self._columns else rows
        out = _filled(self.inner)(half.half()).float()
        for index, column in enumerate(self._columns):
            out.addcmul_(rows[:, column, None].float(), self.outlier_weight[index])
        if self.bias is not None:
            out += self.bias
        return self.shaped(out.to(x.dtype), x)


class BitsAndBytesNf4Linear(DeviceLinear):
    """4-bit NormalFloat weights, double quantized, multiplied in the activations' type.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        place: Device and type; weights stay on the device.
    """

    def __init__(self, in_features: int, out_features: int, place: Place) -> None:
        super().__init__(in_features, out_features, place)
        self.inner: nn.Module | None = None

    def fill(self, weight: torch.Tensor) -> None:
        """Quantizes and keeps the weight."""
        import bitsandbytes

        layer = bitsandbytes.nn.Linear4bit(
            self.in_features,
            self.out_features,
            bias=False,
            compute_dtype=self.place.dtype,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        layer.weight = bitsandbytes.nn.Params4bit(
            self.arriving(weight).cpu().contiguous(),
            requires_grad=False,
            compress_statistics=True,
            quant_type="nf4",
        )
        self.inner = layer.to(self.place.device)  # quantizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., in_features] into [..., out_features], in x's type."""
        out: torch.Tensor = _filled(self.inner)(x)
        return out if self.bias is None else (out + self.bias).to(x.dtype)


def _filled(inner: nn.Module | None) -> nn.Module:
    if inner is None:
        raise ModelLoadError("a linear layer was used before its weight was read")
    return inner
