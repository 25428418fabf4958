"""A step's layout and a layer's store on a GPU, and what the host keeps of them."""

from dataclasses import dataclass

import torch

from ..layout import KVLayer, StepLayout


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
