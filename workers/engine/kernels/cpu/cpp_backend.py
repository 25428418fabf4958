"""The C++ kernels behind the backend interface of `ops`. Calls release the GIL."""

import ctypes

import torch

from .. import reference
from ..composed import Composed, LlamaLayerWeights
from ..layout import KVLayer, PackedWeight, StepLayout
from .cpp_library import failure, load
from .cpp_tasks import STORE_KINDS, PreparedLayer, address, set_layout, store_task

TILE = 16
"""Outputs per weight tile; `kOutputTile` in csrc/table.h."""
ROWS_AT_ONCE = 8 * TILE
"""Rows quantized together: their temporaries stay in cache, several times faster."""


def pack_tiles(q: torch.Tensor, inner: int) -> torch.Tensor:
    """Arranges a quantized weight as [N / 16][K / inner][16][inner], zero padded.

    Args:
        q: int8 [N, K].
        inner: Neighbouring inputs per output: 2 for INT16 activations, 4 for INT8.

    Returns:
        int8, flat; N rounded up to 16 and K to 4.
    """
    n, k = q.shape
    rows, columns = -(-n // TILE) * TILE, -(-k // 4) * 4
    padded = q.new_zeros((rows, columns))
    padded[:n, :k] = q
    # What stays together moves as one number: a start is half a second shorter.
    together = padded.view({2: torch.int16, 4: torch.int32}[inner])
    tiles = together.view(rows // TILE, TILE, columns // inner)
    return tiles.transpose(1, 2).contiguous().view(torch.int8).view(-1)


class CppBackend(Composed):
    """Compiled kernels; constructing it loads the library.

    Every operation raises MemoryError where the kernels' workspace does not fit, and
    EngineError for anything else that they throw.

    Raises:
        ImportError: Not built.
        OSError: Built, but cannot be loaded here.
    """

    def __init__(self) -> None:
        self._library = load()
        self._linear = self._library.tm_linear
        self._kv_write = self._library.tm_kv_write
        self._attention = self._library.tm_attention
        self.set_num_threads(torch.get_num_threads())

    @property
    def name(self) -> str:
        """The instruction set in force, for example "c++/avx2"."""
        return f"c++/{self._library.tm_isa().decode()}"

    def use(self, instruction_set: str) -> bool:
        """Forces an instruction set, for tests.

        Args:
            instruction_set: As in `name` behind the slash.

        Returns:
            False if this build or this CPU lacks it; then nothing changes.
        """
        return bool(self._library.tm_use(instruction_set.encode()))

    def set_num_threads(self, count: int) -> None:
        """Bounds the threads of every later call."""
        self._library.tm_set_threads(count)

    def quantize_weight(self, w: torch.Tensor, *, activations: str) -> PackedWeight:
        """See `reference.quantize_weight`."""
        n, k = w.shape
        rows, columns = -(-n // TILE) * TILE, -(-k // 4) * 4
        scale = w.new_zeros(rows)
        data = torch.empty(rows * columns, dtype=torch.int8)
        for start in range(0, n, ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            q, scale[part][: len(w[part])] = reference.quantize_channels(w[part])
            tiles = pack_tiles(q, 2 if activations == "int16" else 4)
            data[start * columns : start * columns + len(tiles)] = tiles
        return PackedWeight(data, scale, n, k, activations, "cpp")

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `reference.linear`."""
        rows = x.shape[0]
        y = torch.empty((rows, weight.out_features))
        status = self._linear(
            x.data_ptr(),
            rows,
            weight.in_features,
            x.stride(0),
            weight.data.data_ptr(),
            weight.scale.data_ptr(),
            weight.out_features,
            address(bias),
            y.data_ptr(),
            weight.activations == "int16",
        )
        if status:
            raise self._failure(
                status,
                f"linear [{rows}, {weight.in_features} -> {weight.out_features}]",
            )
        return y

    def kv_write(
        self, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, layout: StepLayout
    ) -> None:
        """See `reference.kv_write`."""
        _, heads, block_size, _ = layer.k.shape
        status = self._kv_write(
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            layout.slot_mapping.data_ptr(),
            k.shape[0],
            heads,
            layer.head_dim,
            block_size,
            STORE_KINDS[layer.kind],
            layer.k.data_ptr(),
            layer.v.data_ptr(),
            address(layer.k_scale),
            address(layer.v_scale),
        )
        if status:
            raise self._failure(status, f"kv_write of {k.shape[0]} tokens")

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
        out = torch.empty(q.shape)
        task = store_task(layer, q.shape[1], scale, window)
        set_layout(task, layout)
        task.q = q.data_ptr()
        task.q_stride = q.stride(0)
        task.out = out.data_ptr()
        task.alibi = address(alibi)
        task.alibi_stride = 0 if alibi is None else alibi.shape[1]
        task.softcap = softcap or 0.0
        sequences = layout.context_length.shape[0]
        status = self._attention(ctypes.byref(task), sequences)
        if status:
            raise self._failure(
                status, f"attention of {q.shape[0]} tokens in {sequences} sequences"
            )
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """See `Composed.rms_norm`."""
        x = x.contiguous()
        y = torch.empty(x.shape)
        n = x.shape[-1]
        status = self._library.tm_rms_norm(
            x.data_ptr(),
            x.numel() // n,
            n,
            weight.data_ptr(),
            n,
            epsilon,
            y.data_ptr(),
        )
        if status:
            raise self._failure(status, f"rms_norm {list(x.shape)}")
        return y

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Composed.silu_multiply`."""
        gate_up = gate_up.contiguous()
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty((rows, inner))
        status = self._library.tm_silu_multiply(
            gate_up.data_ptr(), rows, inner, y.data_ptr()
        )
        if status:
            raise self._failure(status, f"silu_multiply {list(gate_up.shape)}")
        return y

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """See `Composed.rotate`."""
        if x.stride(2) != 1 or x.stride(1) != x.shape[2] or x.shape[2] % 2:
            super().rotate(x, cos, sin)
            return
        cos, sin = cos.contiguous(), sin.contiguous()
        status = self._library.tm_rotate(
            x.data_ptr(),
            x.shape[0],
            x.stride(0),
            x.shape[1],
            x.shape[2],
            cos.data_ptr(),
            sin.data_ptr(),
        )
        if status:
            raise self._failure(status, f"rotate {list(x.shape)}")

    def llama_layer(
        self,
        x: torch.Tensor,
        weights: LlamaLayerWeights,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: KVLayer,
        layout: StepLayout,
    ) -> None:
        """See `ops.llama_layer`; one call of C++."""
        prepared = weights.prepared
        if not isinstance(prepared, PreparedLayer) or prepared.store is not layer:
            prepared = weights.prepared = PreparedLayer(weights, layer)
        prepared.enter(layout)
        status = self._library.tm_llama_layer(
            prepared.weights_address,
            prepared.task_address,
            layout.slot_mapping.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            x.data_ptr(),
            x.shape[0],
            layout.context_length.shape[0],
        )
        if status:
            raise self._failure(status, f"a decoder layer of {x.shape[0]} tokens")

    def _failure(self, status: int, asked: str) -> Exception:
        return failure(self._library, status, asked)
