"""Which linear layer a device gets for a precision of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from ..device import check_device
from ..placing import Maker
from .bnb_linear import BitsAndBytesInt8Linear, BitsAndBytesNf4Linear
from .device_linear import DeviceFloatLinear, Place

if TYPE_CHECKING:
    import torch

    from ..calibration.tuning import Tuning
    from ..device import Target
    from ..quantize import EmptyLinear, Weights

log = structlog.get_logger("tokenmill.model")

OUTLIER_COLUMNS: Final = 16
"""Inputs that 8-bit rows leave in full precision where a layer's mean is known."""
_LAYER_LINEARS: Final = ("qkv", "output", "gate_up", "down")
Home = Callable[[str], "torch.device"]
"""The device that keeps a layer's weights, by the layer's dotted name."""


def device_maker(
    weights: Weights,
    target: Target,
    home: Home,
    tuning: Tuning,
    *,
    threshold: float = 0.0,
    merged: bool = False,
) -> Maker | None:
    """Returns what makes a device's linear layers, or None for the model's own.

    Args:
        weights: Precision.
        target: Where they compute.
        home: Where their weights stay.
        tuning: What calibration found.
        threshold: bitsandbytes' dynamic threshold, for "int8-bnb".
        merged: Some layers are merged, so that floats need a layer of ours, too.

    Raises:
        ModelLoadError: This precision needs a GPU's kernels.
    """
    if not target.is_accelerator:
        check_device(weights, target.name)
    if weights == "int8-a8" or (weights == "int8-bnb" and threshold == 0):
        _warn_without_columns(weights, tuning)
    if weights in ("int8", "int8-a8"):
        return _int8_maker(weights, target, home, tuning)
    if weights in ("int8-bnb", "nf4"):
        return _library_maker(weights, target, tuning, threshold)
    if not merged:
        return None

    def floats(name: str, inputs: int, outputs: int) -> EmptyLinear:
        place = Place(target.device, home(name), target.dtype)
        return DeviceFloatLinear(inputs, outputs, place)

    return floats


def _library_maker(
    weights: Weights, target: Target, tuning: Tuning, threshold: float
) -> Maker:
    """Makes bitsandbytes' layers."""
    place = Place(target.device, target.device, target.dtype)

    def make(name: str, inputs: int, outputs: int) -> EmptyLinear:
        if weights == "nf4":
            return BitsAndBytesNf4Linear(inputs, outputs, place)
        return BitsAndBytesInt8Linear(
            inputs,
            outputs,
            place,
            outlier_columns=outlier_columns(tuning, name),
            threshold=threshold,
        )

    return make


def _warn_without_columns(weights: Weights, tuning: Tuning) -> None:
    """Says which layers quantize outliers, too, for want of a calibrated mean."""
    calibrated = {key.rpartition(".")[2] for key in tuning.means}
    without = [linear for linear in _LAYER_LINEARS if linear not in calibrated]
    if without:
        log.warning(
            "no_outlier_columns",
            weights=weights,
            layers=without,
            reason="the calibration has no mean of their inputs",
            cost="large inputs widen the scale of their 8-bit rows; quality is lower",
        )


def outlier_columns(tuning: Tuning, name: str) -> list[int]:
    """Returns the inputs of a layer that are largest on average, by calibration.

    Args:
        tuning: A layer without a mean in it has none.
        name: The layer's dotted name.
    """
    mean = tuning.mean(name)
    if mean is None:
        return []
    count = min(OUTLIER_COLUMNS, len(mean))
    columns: list[int] = mean.abs().topk(count).indices.tolist()
    return columns


def _int8_maker(weights: Weights, target: Target, home: Home, tuning: Tuning) -> Maker:
    from .int8 import DeviceInt8Linear, WideInt8Linear
    from .linear import shared_matmul

    matmul = shared_matmul(target.ops)

    def make(name: str, inputs: int, outputs: int) -> EmptyLinear:
        place = Place(target.device, home(name), target.dtype)
        if weights == "int8":
            return WideInt8Linear(
                inputs,
                outputs,
                place,
                target.ops,
                mean=tuning.mean(name),
                precise=tuning.is_sensitive(name),
            )
        return DeviceInt8Linear(
            inputs,
            outputs,
            place,
            outlier_columns=outlier_columns(tuning, name),
            matmul=matmul,
        )

    return make
