"""INT8 linear layers on a GPU: the library whose product is fastest for each shape.

Rows are quantized one by one (no threshold over the batch, as bitsandbytes' own layer
has it: there the outlier columns of one request change the numbers of its batch mates)
and the outlier columns are static. The integer product is exact, so which library
computes it changes no bit and may be decided by measurement.
"""

from collections.abc import Callable, Iterable
from functools import partial

import structlog
import torch

from ....shared.errors import EngineError
from ..kernels.reference import quantize_channels
from ..kernels.triton.linear import int8_matmul as triton_matmul
from ..kernels.triton.linear import rescale
from ..kernels.triton.ops import Int8Matmul, TritonOps
from ..kernels.triton.quantize import quantize_rows

_log = structlog.get_logger("tokenmill.gpu")

INT_MM_MIN_ROWS = 17
"""`torch._int_mm` on CUDA refuses fewer rows; smaller batches are padded."""
INT_MM_MULTIPLE = 8
"""On CUDA it also wants K and N to be multiples of this."""
MEASURED_RUNS = 5
"""Runs of each candidate per shape, after one that warms up; the fastest counts."""


def bitsandbytes_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of bitsandbytes' functional interface.

    Args:
        a: int8 [T, K].
        b: int8 [N, K].

    Returns:
        int32 [T, N], a @ b.T.
    """
    from bitsandbytes import functional

    product: torch.Tensor = functional.int8_linear_matmul(a, b)
    return product


def torch_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of `torch._int_mm`, rows padded where CUDA wants more of them.

    Args:
        a: int8 [T, K].
        b: int8 [N, K].

    Returns:
        int32 [T, N], a @ b.T.
    """
    rows = a.shape[0]
    if a.is_cuda and rows < INT_MM_MIN_ROWS:
        a = torch.nn.functional.pad(a, (0, 0, 0, INT_MM_MIN_ROWS - rows))
    return torch._int_mm(a, b.t())[:rows]  # noqa: SLF001  (the only name it has)


CANDIDATES: dict[str, Int8Matmul] = {
    "bitsandbytes": bitsandbytes_matmul,
    "torch": torch_matmul,
    "triton": triton_matmul,
}
"""By name, in order of preference where nothing can be measured."""


def _allowed(name: str, inner: int, columns: int) -> bool:
    """Whether a candidate takes weights of this shape on CUDA."""
    aligned = inner % INT_MM_MULTIPLE == 0 and columns % INT_MM_MULTIPLE == 0
    return name == "triton" or aligned


def _milliseconds(run: Callable[[], object]) -> float:
    """Device time of the fastest of some runs."""
    run()
    best = float("inf")
    for _ in range(MEASURED_RUNS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best


class MeasuredMatmul:
    """An INT8 product that picks its library by shape.

    On CUDA the first call of a shape (rows rounded up to a power of two) measures the
    candidates; `prepare` does so ahead of serving and of graph capture. On other
    devices nothing is measured and bitsandbytes is used.
    """

    def __init__(self) -> None:
        self._chosen: dict[tuple[int, int, int], str] = {}

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiplies exactly.

        Args:
            a: int8 [T, K], contiguous.
            b: int8 [N, K], contiguous.

        Returns:
            int32 [T, N], a @ b.T.
        """
        if not a.is_cuda:
            return bitsandbytes_matmul(a, b)
        key = (_bucket(a.shape[0]), a.shape[1], b.shape[0])
        name = self._chosen.get(key)
        if name is None:
            name = self._measure(key, b)
        return CANDIDATES[name](a, b)

    def prepare(self, weights: Iterable[torch.Tensor], max_rows: int) -> None:
        """Measures every shape that will occur.

        Args:
            weights: int8 [N, K] of the model's layers, on the device.
            max_rows: Most tokens of a step.
        """
        for weight in weights:
            rows = 1
            while weight.is_cuda and rows < 2 * max_rows:
                key = (_bucket(rows), weight.shape[1], weight.shape[0])
                if key not in self._chosen:
                    self._measure(key, weight)
                rows *= 2

    def report(self) -> dict[str, str]:
        """Returns which library runs each "rows x K x N", for `tokenmill doctor`."""
        return {
            f"{rows}x{inner}x{columns}": name
            for (rows, inner, columns), name in sorted(self._chosen.items())
        }

    def __str__(self) -> str:
        used = sorted(set(self._chosen.values()))
        return "+".join(used) if used else "bitsandbytes (not measured)"

    def _measure(self, key: tuple[int, int, int], weight: torch.Tensor) -> str:
        rows, inner, columns = key
        if torch.cuda.is_current_stream_capturing():
            # Timing would break the capture; the Triton kernel takes every shape.
            _log.warning("int8_matmul_not_measured", shape=key, used="triton")
            return "triton"
        sample = torch.zeros((rows, inner), dtype=torch.int8, device=weight.device)
        times: dict[str, float] = {}
        for name, matmul in CANDIDATES.items():
            if not _allowed(name, inner, columns):
                continue
            try:
                times[name] = _milliseconds(partial(matmul, sample, weight))
            except (RuntimeError, NotImplementedError, ImportError) as error:
                _log.warning("int8_matmul_refused", name=name, reason=str(error))
        if not times:
            raise EngineError(f"no INT8 product takes rows x K x N = {key}")
        chosen = min(times, key=lambda name: times[name])
        self._chosen[key] = chosen
        _log.debug("int8_matmul_chosen", shape=key, name=chosen, milliseconds=times)
        return chosen


def _bucket(rows: int) -> int:
    """Rows rounded up to a power of two: the key of a measurement."""
    return 1 << max(rows - 1, 0).bit_length()


class Int8Linear(torch.nn.Module):
    """A linear layer with INT8 weights, 8-bit rows and static outlier columns.

    Args:
        weight: [N, K], any float type, on the layer's device.
        bias: [N] or None.
        outlier_columns: Inputs, found by calibration, that stay in full precision.
        matmul: The product; one `MeasuredMatmul` is shared by a model's layers.

    Raises:
        EngineError: The weight is not finite or an outlier column does not exist.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    outlier_columns: torch.Tensor
    outlier_weight: torch.Tensor

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        outlier_columns: Iterable[int] = (),
        matmul: Int8Matmul,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        columns = sorted(set(outlier_columns))
        if columns and not 0 <= columns[0] <= columns[-1] < self.in_features:
            raise EngineError(
                f"outlier columns {columns[0]}..{columns[-1]} are outside the "
                f"layer's {self.in_features} inputs"
            )
        if not bool(torch.isfinite(weight).all()):
            raise EngineError("weight has NaN or infinity; the checkpoint is damaged")
        index = torch.tensor(columns, dtype=torch.int64, device=weight.device)
        full = weight.detach().float().clone()
        self.register_buffer("outlier_columns", index)
        self.register_buffer("outlier_weight", full[:, index].t().contiguous())
        # Zeroed first, so that an outlier's weight does not widen its row's scale.
        full[:, index] = 0.0
        values, scale = quantize_channels(full)
        self.register_buffer("weight", values.contiguous())
        self.register_buffer("weight_scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self._matmul = matmul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes x @ weight.T + bias, each row alone.

        Args:
            x: [..., K], float32 or half precision.

        Returns:
            [..., N] in the type of `x`.
        """
        rows = x.reshape(-1, self.in_features).contiguous()
        outliers = self.outlier_columns
        kept = rows.index_fill(1, outliers, 0.0) if len(outliers) else rows
        values, scale = quantize_rows(kept, "int8")
        out = rescale(
            self._matmul(values, self.weight),
            rows,
            scale,
            self.weight_scale,
            bias=self.bias,
            outlier_columns=outliers if len(outliers) else None,
            outlier_weight=self.outlier_weight if len(outliers) else None,
        )
        return out.reshape(*x.shape[:-1], self.out_features)


def gpu_ops(device: torch.device | str) -> TritonOps:
    """The operations of a model on a GPU, with measured INT8 products.

    Args:
        device: The CUDA device.

    Returns:
        An `OpsProtocol`.
    """
    return TritonOps(device, int8_matmul=MeasuredMatmul())
