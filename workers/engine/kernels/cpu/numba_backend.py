"""The Numba kernels behind the backend interface of `ops`."""

import threading
import time

import numba
import numpy as np
import structlog
import torch

from .. import reference
from ..composed import Composed
from ..layout import KVLayer, PackedWeight, StepLayout
from .numba_cache import prepare_cache

prepare_cache()  # before the kernels are decorated

from . import numba_attention, numba_kv, numba_linear  # noqa: E402

NO_VALUES = np.zeros(0, dtype=np.float32)
NO_SCALES = np.zeros((0, 0, 0), dtype=np.float32)
NO_GROUPS = np.zeros((0, 0, 0, 0), dtype=np.uint16)


class NumbaBackend(Composed):
    """Kernels compiled on first use and cached on disk."""

    name = "numba"

    def __init__(self) -> None:
        # Numba's fallback thread layer ends the process if two threads enter it.
        self._turn = threading.Lock()
        begun = time.perf_counter()
        self._warm_up()
        structlog.get_logger("tokenmill.kernels").info(
            "numba_kernels_ready",
            seconds=round(time.perf_counter() - begun, 2),
            cache=numba.config.CACHE_DIR,
        )

    def _warm_up(self) -> None:
        """Compiles, or loads from the cache, what an INT8 model needs."""
        x = torch.ones((2, 64))
        self.linear(x, self.quantize_weight(x, activations="int16"), None)
        layer = KVLayer.allocate(1, 1, 8, 64, kind="int8")
        layout = StepLayout(
            torch.arange(2),
            torch.tensor([0, 2], dtype=torch.int32),
            torch.tensor([2], dtype=torch.int32),
            torch.zeros((1, 1), dtype=torch.int32),
            torch.arange(2),
        )
        heads = x.view(2, 1, 64)
        self.kv_write(heads, heads, layer, layout)
        self.paged_attention(
            heads,
            layer,
            layout,
            scale=1.0,
            window=None,
            alibi=None,
            softcap=None,
        )

    def set_num_threads(self, count: int) -> None:
        """Bounds the threads of every later call of this thread."""
        numba.set_num_threads(max(1, min(count, numba.config.NUMBA_NUM_THREADS)))

    def quantize_weight(self, w: torch.Tensor, *, activations: str) -> PackedWeight:
        """See `reference.quantize_weight`; rows stay contiguous."""
        q, scale = reference.quantize_channels(w)
        return PackedWeight(
            q.contiguous(), scale, w.shape[0], w.shape[1], activations, "numba"
        )

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `reference.linear`."""
        values = x.detach().contiguous().numpy()
        y = np.empty((values.shape[0], weight.out_features), dtype=np.float32)
        with self._turn:
            numba_linear.linear(
                values,
                values.view(np.int32),
                np.float32(reference.LEVELS[weight.activations]),
                weight.data.numpy(),
                weight.scale.numpy(),
                NO_VALUES if bias is None else bias.detach().numpy(),
                y,
            )
        return torch.from_numpy(y)

    def kv_write(
        self, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, layout: StepLayout
    ) -> None:
        """See `reference.kv_write`."""
        if layer.k_scale is None or layer.v_scale is None:
            reference.kv_write(k, v, layer, layout)
            return
        slots = layout.slot_mapping.numpy()
        for source, store, scales in (
            (k, layer.k, layer.k_scale),
            (v, layer.v, layer.v_scale),
        ):
            values = source.detach().contiguous().numpy()
            bits = values.view(np.int32)
            if layer.kind == "int4":
                numba_kv.write_int4(values, bits, slots, store.numpy(), _bits(scales))
            else:
                numba_kv.write_int8(values, bits, slots, store.numpy(), scales.numpy())

    def paged_attention(
        self,
        q: torch.Tensor,
        layer: KVLayer,
        layout: StepLayout,
        *,
        scale: float,
        window: int | None,
        alibi: torch.Tensor | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `reference.paged_attention`."""
        out = np.empty(tuple(q.shape), dtype=np.float32)
        biases = (
            np.empty((q.shape[1], 0), dtype=np.float32)
            if alibi is None
            else alibi.numpy()
        )
        with self._turn:
            numba_attention.attend(
                q.detach().contiguous().numpy(),
                layer.k.numpy(),
                layer.v.numpy(),
                *_scales(layer),
                _items(layout, layer.k.shape[1]),
                layout.block_table.numpy(),
                np.float32(scale),
                window or 0,
                biases,
                np.float32(softcap or 0.0),
                out,
            )
        return torch.from_numpy(out)


def _bits(scales: torch.Tensor) -> np.ndarray:
    """Returns bfloat16 as uint16, a view: NumPy has no bfloat16."""
    return scales.view(torch.int16).numpy().view(np.uint16)


def _scales(layer: KVLayer) -> tuple[np.ndarray, ...]:
    """Returns scales of K and V as `attend` takes them: of INT8, then of INT4."""
    if layer.k_scale is None or layer.v_scale is None:
        return NO_SCALES, NO_SCALES, NO_GROUPS, NO_GROUPS
    if layer.kind == "int4":
        return NO_SCALES, NO_SCALES, _bits(layer.k_scale), _bits(layer.v_scale)
    return layer.k_scale.numpy(), layer.v_scale.numpy(), NO_GROUPS, NO_GROUPS


def _items(layout: StepLayout, kv_heads: int) -> np.ndarray:
    """Cuts a step into pieces of at most 16 queries of one sequence and KV head."""
    starts = layout.query_start.tolist()
    rows = [
        (
            sequence,
            head,
            starts[sequence] + first,
            min(step, length - first),
            base + first,
        )
        for sequence, context in enumerate(layout.context_length.tolist())
        for step in (numba_attention.QUERIES,)
        for length in (starts[sequence + 1] - starts[sequence],)
        for base in (context - length,)
        for first in range(0, length, step)
        for head in range(kv_heads)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 5)
