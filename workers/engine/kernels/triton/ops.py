"""The GPU's side of `OpsProtocol`: the same calls as `kernels.ops`, on a device."""

from collections.abc import Callable

import torch
import triton

from .....shared.errors import EngineError
from .. import reference
from ..layout import KVLayer, PackedWeight, StepLayout
from .attention import Tiling, paged_attention
from .kv_write import kv_write
from .linear import linear, rescale
from .quantize import quantize_rows

Int8Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""int8 [T, K] and int8 [N, K] to their exact int32 product [T, N]."""


class TritonOps:
    """Triton kernels on one device.

    Args:
        device: The CUDA device; "cpu" works in Triton's interpreter alone.
        int8_matmul: A library's product for layers with 8-bit activations; None for
            the Triton kernel that gives the reference's bits.
        tiling: Tile sizes of attention, fixed for this object's life.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        int8_matmul: Int8Matmul | None = None,
        tiling: Tiling | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.int8_matmul = int8_matmul
        self._tiling = tiling or Tiling()

    def quantize_weight(
        self, w: torch.Tensor, *, activations: str = "int16"
    ) -> PackedWeight:
        """Quantizes a weight to INT8 per output channel, on this device.

        Args:
            w: float32 [N, K], on any device.
            activations: "int16" or "int8": how inputs are quantized.

        Returns:
            The weight with `data` int8 [N, K].

        Raises:
            EngineError: Wrong shape or activations, or a weight is not finite.
        """
        if activations not in reference.LEVELS:
            raise EngineError(
                f"activations '{activations}' unknown; "
                f"expected one of {tuple(reference.LEVELS)}"
            )
        if w.dim() != 2:
            raise EngineError(f"weight is {list(w.shape)}; expected [N, K]")
        w = w.to(self.device, torch.float32)
        if not bool(torch.isfinite(w).all()):
            raise EngineError("weight has NaN or infinity; the checkpoint is damaged")
        q, scale = reference.quantize_channels(w)
        return PackedWeight(
            q.contiguous(), scale, w.shape[0], w.shape[1], activations, "triton"
        )

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes x @ w.T + bias, each row alone (see `reference.linear`).

        Args:
            x: [T, K], float32 or half precision.
            weight: From this object's `quantize_weight`.
            bias: [N] or None.

        Returns:
            [T, N] in the type of `x`.

        Raises:
            EngineError: Shapes do not match, or another backend packed the weight.
        """
        if weight.backend != "triton":
            raise EngineError(
                f"weight was packed by '{weight.backend}'; expected 'triton'"
            )
        if x.dim() != 2 or x.shape[1] != weight.in_features:
            raise EngineError(
                f"input is {list(x.shape)}; expected [tokens, {weight.in_features}]"
            )
        if self.int8_matmul is None or weight.activations != "int8":
            return linear(x, weight, bias)
        x = x.contiguous()
        values, scale = quantize_rows(x, "int8")
        products = self.int8_matmul(values, weight.data)
        return rescale(products, x, scale, weight.scale, bias=bias)

    def kv_write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        store_layer: KVLayer,
        layout: StepLayout,
    ) -> None:
        """Writes the step's K and V into their slots (see `reference.kv_write`).

        Args:
            k: [T, kv_heads, D], float32 or half precision.
            v: As `k`.
            store_layer: Changed in place.
            layout: The step's slots.

        Raises:
            EngineError: Shapes do not match the store.
        """
        heads, dim = store_layer.k.shape[1], store_layer.head_dim
        expected = (layout.slot_mapping.shape[0], heads, dim)
        for name, values in (("k", k), ("v", v)):
            if tuple(values.shape) != expected:
                raise EngineError(
                    f"{name} is {list(values.shape)}; expected {list(expected)}"
                )
        kv_write(k, v, store_layer, layout)

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
        """Causal attention over the paged store (see `reference.paged_attention`).

        Args:
            q: [T, heads, D], float32 or half precision.
            store_layer: This step's own K and V are already in it.
            layout: The step's sequences; a `DeviceLayout` avoids a copy a call.
            scale: Factor on the dot products.
            window: Keys a query sees at most, its own included; None is all.
            alibi: float32 [heads, positions]; adds what stands at the key less what
                stands at the query.
            softcap: Scores become softcap * tanh(score / softcap).

        Returns:
            [T, heads, D] in the type of `q`.

        Raises:
            EngineError: Shapes do not match the store.
        """
        kv_heads, dim = store_layer.k.shape[1], store_layer.head_dim
        tokens = layout.slot_mapping.shape[0]
        heads = q.shape[1] if q.dim() == 3 else 0
        if heads == 0 or heads % kv_heads or q.shape[0] != tokens or q.shape[2] != dim:
            raise EngineError(
                f"q is {list(q.shape)}; "
                f"expected [{tokens}, a multiple of {kv_heads}, {dim}]"
            )
        return paged_attention(
            q,
            store_layer,
            layout,
            scale=scale,
            window=window,
            alibi=alibi,
            softcap=softcap,
            tiling=self._tiling,
        )

    def backend_report(self) -> dict[str, str]:
        """Returns what runs on which device, for the log and `tokenmill doctor`."""
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else "interpreter"
        matmul = self.int8_matmul
        return {
            "backend": f"triton {triton.__version__}",
            "reason": f"device {self.device} ({name})",
            "int8_matmul": "triton" if matmul is None else str(matmul),
        }
