"""What linear layers on a device share; each waits for its weight like the CPU's.

Everything that such a layer keeps is a buffer, so that `offload.py` can hold a layer in
host memory and bring it to the device for a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .....shared.errors import EngineError
from ..quantize import EmptyLinear


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer computes and where its weights stay."""

    device: torch.device
    home: torch.device
    """The device, or the host for a layer that does not fit there."""
    dtype: torch.dtype
    """Of activations."""


class DeviceLinear(EmptyLinear):
    """What every layer on a device has: its place, and buffers that stay at home.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        place: Device, home and type.
    """

    def __init__(self, in_features: int, out_features: int, place: Place) -> None:
        super().__init__(in_features, out_features)
        del self.bias  # a buffer here
        self.register_buffer("bias", None)
        self.place = place

    def fill_bias(self, bias: torch.Tensor) -> None:
        """Keeps the bias as float32."""
        self.bias = bias.to(self.place.home, torch.float32, copy=True)

    def keep(self, name: str, values: torch.Tensor) -> None:
        """Makes a tensor part of the layer."""
        self.register_buffer(name, values.to(self.place.home).contiguous())

    def arriving(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns a weight as float32 on the device, where it is quantized.

        Raises:
            EngineError: It is not finite.
        """
        weight = weight.detach().to(self.place.device, torch.float32)
        if not bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all()):
            raise EngineError("weight has NaN or infinity; the checkpoint is damaged")
        return weight

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., in_features] as contiguous [rows, in_features]."""
        return x.reshape(-1, self.in_features).contiguous()

    def shaped(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns [rows, out_features] with the leading dimensions of x."""
        return out.reshape(*x.shape[:-1], self.out_features)


class DeviceFloatLinear(DeviceLinear):
    """Weights in the type of the activations, multiplied by the device's library.

    The library chooses its order of summation by the number of rows, so that a
    request's last bits depend on its batch.
    """

    weight: torch.Tensor

    def fill(self, weight: torch.Tensor) -> None:
        """Keeps the weight."""
        self.keep("weight", weight.to(self.place.home, self.place.dtype, copy=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., in_features] into [..., out_features]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight, bias)


class OutlierLinear(DeviceLinear):
    """An INT8 layer of whose inputs some columns stay in full precision.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        place: Device, home and type.
        outlier_columns: Inputs, found by calibration, that are not quantized.

    Raises:
        EngineError: An outlier column does not exist.
    """

    outlier_columns: torch.Tensor
    outlier_weight: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        place: Place,
        outlier_columns: Iterable[int],
    ) -> None:
        super().__init__(in_features, out_features, place)
        columns = _checked_columns(outlier_columns, in_features)
        self.keep("outlier_columns", torch.tensor(columns, dtype=torch.int64))

    def without_outliers(self, weight: torch.Tensor) -> torch.Tensor:
        """Keeps the outliers' weights and returns the others, float32 on the device.

        The outliers' are zero in it, so that none widens its row's scale.
        """
        full = self.arriving(weight).clone()
        columns = self.outlier_columns.to(full.device)
        self.keep("outlier_weight", full[:, columns].t())
        full[:, columns] = 0.0
        return full


def _checked_columns(columns: Iterable[int], in_features: int) -> list[int]:
    """Returns outlier columns, each once and rising.

    Raises:
        EngineError: One does not exist.
    """
    rising = sorted(set(columns))
    if rising and not 0 <= rising[0] <= rising[-1] < in_features:
        raise EngineError(
            f"outlier columns {rising[0]}..{rising[-1]} are outside the "
            f"layer's {in_features} inputs"
        )
    return rising
