"""Decoder layers that do not fit on the device stay in host memory.

Their weights travel to the device for each call, by accelerate's hooks, and are dropped
after it: a step then takes as long as the copy, but a model that is too large runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import structlog
import torch
from torch import nn

from .....shared.errors import ModelLoadError
from ..placing import is_linear
from ..quantize import INT8_WEIGHTS
from ..sizes import NF4_BITS

if TYPE_CHECKING:
    from ..quantize import Weights

log = structlog.get_logger("tokenmill.model")

OFFLOADABLE: Final = frozenset({"int8", "int8-a8", "float32", "bfloat16", "float16"})
"""bitsandbytes' layers keep statistics beside their weights that hooks do not move."""
_INT8_SCALE_BYTES: Final = 4


def resident_layers(layer_bytes: Sequence[int], room: int) -> int:
    """Returns how many of the first layers stay on the device.

    Args:
        layer_bytes: Bytes of each layer, first to last.
        room: Bytes that layers may take. If any has to go, the largest of them needs
            room for a visit.
    """
    if sum(layer_bytes) <= room:
        return len(layer_bytes)
    room -= max(layer_bytes)
    count = 0
    for size in layer_bytes:
        room -= size
        if room < 0:
            break
        count += 1
    return count


def module_bytes(module: nn.Module, weights: Weights, dtype: torch.dtype) -> int:
    """Returns the bytes that a module of the unfilled model will take.

    Args:
        module: On the meta device.
        weights: Precision of its linear layers.
        dtype: Of everything else.
    """
    total = 0
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            linear = is_linear(part) and name == "weight"
            if linear and weights in INT8_WEIGHTS:
                rows = max(parameter.shape)  # of a transposed layer, too: no less
                total += parameter.numel() + rows * _INT8_SCALE_BYTES
            elif linear and weights == "nf4":
                total += math.ceil(parameter.numel() * NF4_BITS / 8)
            else:
                total += parameter.numel() * dtype.itemsize
    return total


class Homes:
    """Which device keeps each weight.

    Args:
        device: Where the model computes.
        layers: Dotted name of the list of decoder layers.
        num_layers: How many there are.
        resident: How many of the first stay on the device.
        weights: Precision of the linear layers.

    Raises:
        ModelLoadError: This precision cannot be split.
    """

    def __init__(
        self,
        device: torch.device,
        layers: str,
        num_layers: int,
        resident: int,
        weights: Weights,
    ) -> None:
        self.offloaded = range(resident, num_layers)
        self._device = device
        self._prefix = layers + "."
        if self.offloaded and weights not in OFFLOADABLE:
            raise ModelLoadError(
                f"{len(self.offloaded)} of {num_layers} layers do not fit on {device}, "
                f"and weights='{weights}' cannot be kept in host memory; use one of "
                f"{', '.join(sorted(OFFLOADABLE))} or a smaller KV pool"
            )

    def __call__(self, name: str) -> torch.device:
        """Returns the home of a layer or a parameter, by its dotted name."""
        if self.offloaded and name.startswith(self._prefix):
            index = name.removeprefix(self._prefix).partition(".")[0]
            if int(index) in self.offloaded:
                return torch.device("cpu")
        return self._device


def attach(layers: Sequence[nn.Module], homes: Homes, device: torch.device) -> None:
    """Makes offloaded layers fetch their weights when they are called.

    Args:
        layers: All decoder layers, filled.
        homes: Says which are offloaded.
        device: Where they compute.
    """
    if not homes.offloaded:
        return
    from accelerate import cpu_offload

    size = 0
    for index in homes.offloaded:
        # Pinned, so that a copy runs at the bus's full rate.
        values = {
            name: value.pin_memory() if device.type == "cuda" else value
            for name, value in layers[index].state_dict().items()
        }
        size += sum(value.nbytes for value in values.values())
        cpu_offload(
            layers[index],
            execution_device=device,
            offload_buffers=True,
            state_dict=values,
        )
    log.warning(
        "layers_offloaded",
        count=len(homes.offloaded),
        of=len(layers),
        mib=size >> 20,
        cost="their weights are copied to the device in every step",
    )
