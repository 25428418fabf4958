"""A step's layout and a layer's store on a GPU, and what the host keeps of them."""

from dataclasses import dataclass
from typing import Final

import torch

from ..layout import KVKind, KVLayer, StepLayout

STORED_BITS: Final[dict[KVKind, int]] = {"int4": 4, "int8": 8, "float32": 32}
"""Bits of a stored element, by which the kernels are told apart."""


@dataclass(frozen=True, slots=True)
class DeviceLayout(StepLayout):
    """A step's layout on a device. The host keeps what decides the launches."""

    max_query: int
    """Most tokens of one sequence in the step."""
    max_context: int
    """Longest context of the step."""


def to_device(layout: StepLayout, device: torch.device | str) -> DeviceLayout:
    """Copies a layout to a device, once a step.

    Args:
        layout: Built on the CPU by `StepLayout.from_batch`.
        device: Where the kernels run.

    Returns:
        The copy. Launching from it never waits for the device.
    """
    if isinstance(layout, DeviceLayout):
        return layout
    lengths = layout.query_start[1:] - layout.query_start[:-1]
    return DeviceLayout(
        layout.slot_mapping.to(device, non_blocking=True),
        layout.query_start.to(device, non_blocking=True),
        layout.context_length.to(device, non_blocking=True),
        layout.block_table.to(device, non_blocking=True).contiguous(),
        layout.positions.to(device, non_blocking=True),
        int(lengths.max()) if lengths.numel() else 0,
        int(layout.context_length.max()) if lengths.numel() else 0,
    )


def store_to_device(layer: KVLayer, device: torch.device | str) -> KVLayer:
    """Copies a layer's store to a device, when the pool is made.

    Args:
        layer: The store as `KVLayer.allocate` made it.
        device: Where the kernels run.
    """
    return KVLayer(
        layer.k.to(device),
        layer.v.to(device),
        None if layer.k_scale is None else layer.k_scale.to(device),
        None if layer.v_scale is None else layer.v_scale.to(device),
    )


def empty_store_like(layer: KVLayer, device: torch.device | str) -> KVLayer:
    """Returns a zeroed store of the same shape on a device; nothing is copied.

    Args:
        layer: Gives shapes and types; its own memory is not touched.
        device: Where the kernels run.
    """

    def zeros(like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=like.dtype, device=device)

    return KVLayer(
        zeros(layer.k),
        zeros(layer.v),
        None if layer.k_scale is None else zeros(layer.k_scale),
        None if layer.v_scale is None else zeros(layer.v_scale),
    )


def static_layout(layout: StepLayout, max_context: int) -> DeviceLayout:
    """Returns the layout of a decode step whose launches do not follow its values.

    Args:
        layout: On the device, one query a sequence.
        max_context: At least the longest context that will ever stand there.
    """
    return DeviceLayout(
        layout.slot_mapping,
        layout.query_start,
        layout.context_length,
        layout.block_table,
        layout.positions,
        1,
        max_context,
    )
