"""What the C++ kernels are told: their structs, filled from tensors."""

import ctypes

import torch

from ..composed import LlamaLayerWeights
from ..layout import KVLayer, PackedWeight, StepLayout
from .cpp_library import AttentionTask, Linear, LlamaLayer

STORE_KINDS = {"float32": 0, "int8": 1, "int4": 2}
"""`StoreKind` in csrc/table.h."""


def address(tensor: torch.Tensor | None) -> int | None:
    """Returns where the elements lie; None stays None, a null pointer."""
    return None if tensor is None else tensor.data_ptr()


class PreparedLayer:
    """A layer and its store as C sees them, kept from step to step.

    Filling these structs again for every layer would take longer than the smallest
    operations do.

    Args:
        weights: Keeps the weights' memory alive.
        store: The layer's KV blocks.
    """

    def __init__(self, weights: LlamaLayerWeights, store: KVLayer) -> None:
        self.store = store
        self._layout: StepLayout | None = None
        self._weights = _llama_layer(weights)
        self._task = store_task(store, weights.heads, weights.scale, weights.window)
        self.weights_address = ctypes.addressof(self._weights)
        self.task_address = ctypes.addressof(self._task)

    def enter(self, layout: StepLayout) -> None:
        """Points the task at a step; the step's memory lives until the next one."""
        if layout is not self._layout:
            self._layout = layout
            set_layout(self._task, layout)


def store_task(
    layer: KVLayer, heads: int, scale: float, window: int | None
) -> AttentionTask:
    """Returns the task without layout, queries and output.

    Args:
        layer: The layer's KV blocks.
        heads: Query heads.
        scale: Factor on the dot products.
        window: Keys that a query sees, or None.
    """
    _, kv_heads, block_size, _ = layer.k.shape
    return AttentionTask(
        k=layer.k.data_ptr(),
        v=layer.v.data_ptr(),
        k_scale=address(layer.k_scale),
        v_scale=address(layer.v_scale),
        heads=heads,
        kv_heads=kv_heads,
        dim=layer.head_dim,
        block_size=block_size,
        store_kind=STORE_KINDS[layer.kind],
        window=window or 0,
        scale=scale,
    )


def set_layout(task: AttentionTask, layout: StepLayout) -> None:
    """Points a task at a step's sequences."""
    task.query_start = layout.query_start.data_ptr()
    task.context_length = layout.context_length.data_ptr()
    task.block_table = layout.block_table.data_ptr()
    task.table_stride = layout.block_table.stride(0)


def _linear(weight: PackedWeight, bias: torch.Tensor | None) -> Linear:
    return Linear(
        weight.data.data_ptr(),
        weight.scale.data_ptr(),
        address(bias),
        weight.out_features,
        weight.in_features,
        int(weight.activations == "int16"),
    )


def _llama_layer(weights: LlamaLayerWeights) -> LlamaLayer:
    """Returns the layer as C sees it; `weights` keeps the memory alive."""
    return LlamaLayer(
        weights.attention_norm.data_ptr(),
        weights.mlp_norm.data_ptr(),
        address(weights.q_norm),
        address(weights.k_norm),
        _linear(weights.qkv, weights.qkv_bias),
        _linear(weights.output, weights.output_bias),
        _linear(weights.gate_up, None),
        _linear(weights.down, None),
        weights.qkv.in_features,
        weights.down.in_features,
        weights.epsilon,
    )
