"""What the model asks of a set of kernels, on any device.

The module `kernels.ops` (CPU) and the object `kernels.triton.ops.TritonOps` (GPU) both
satisfy `OpsProtocol`; the model runner holds one of them and knows nothing else about
the device. The numeric definition of each operation is in `reference.py`.
"""

from collections.abc import Mapping
from typing import Protocol

import torch

from .layout import KVLayer, PackedWeight, StepLayout


class OpsProtocol(Protocol):
    """The operations a device must offer. A module or an object may satisfy it."""

    def quantize_weight(
        self, w: torch.Tensor, *, activations: str = "int16"
    ) -> PackedWeight:
        """Quantizes a weight to INT8 per output channel and packs it for `linear`.

        Args:
            w: float32 [N, K].
            activations: "int16" or "int8": how inputs are quantized.

        Returns:
            The packed weight; only the same device's `linear` can read it.
        """
        ...

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes x @ w.T + bias, each row apart from the others.

        Args:
            x: [T, K], float32 (a GPU also takes half precision).
            weight: From `quantize_weight`.
            bias: float32 [N] or None.

        Returns:
            [T, N] in the type of `x`.
        """
        ...

    def kv_write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        store_layer: KVLayer,
        layout: StepLayout,
    ) -> None:
        """Writes the step's K and V into their slots, quantized as the store is.

        Args:
            k: [T, kv_heads, D], float32 (a GPU also takes half precision).
            v: As `k`.
            store_layer: The blocks of this layer, changed in place.
            layout: Gives each token its slot.
        """
        ...

    def paged_attention(
        self,
        q: torch.Tensor,
        store_layer: KVLayer,
        layout: StepLayout,
        *,
        scale: float,
        window: int | None = None,
        alibi: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of packed queries over the paged store.

        Args:
            q: [T, heads, D]; heads is a multiple of the store's KV heads.
            store_layer: This step's own K and V are already in it.
            layout: The step's sequences.
            scale: Factor on the dot products.
            window: Keys a query sees at most, its own included; None is all.
            alibi: float32 [heads, positions]; adds what stands at the key less what
                stands at the query.
            softcap: Scores become softcap * tanh(score / softcap).

        Returns:
            [T, heads, D] in the type of `q`.
        """
        ...

    def backend_report(self) -> Mapping[str, str]:
        """Returns what runs and why, for the log and for `tokenmill doctor`."""
        ...
