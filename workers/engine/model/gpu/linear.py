"""The integer product of INT8 layers on a GPU: the fastest library for each shape.

The product is exact, so which library computes it changes no bit and may be decided by
measurement.
"""

from collections.abc import Callable, Iterable
from functools import partial

import structlog
import torch

from .....shared.errors import EngineError
from ...kernels.protocol import OpsProtocol
from ...kernels.triton.linear import int8_matmul as triton_matmul
from ...kernels.triton.ops import Int8Matmul, TritonOps

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
        """Returns which library runs each "rows x K x N", for the log."""
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


def gpu_ops(device: torch.device | str, *, measured: bool = True) -> TritonOps:
    """The operations of a model on a GPU.

    Args:
        device: The CUDA device.
        measured: With an INT8 product that picks its library by shape; only weights
            with 8-bit rows use it.

    Returns:
        An `OpsProtocol`.
    """
    return TritonOps(device, int8_matmul=MeasuredMatmul() if measured else None)


def shared_matmul(ops: OpsProtocol) -> Int8Matmul:
    """Returns the INT8 product of a device's operations, which names it to people.

    Args:
        ops: Operations that were given none, or a host's, get one that is measured.
    """
    if isinstance(ops, TritonOps) and ops.int8_matmul is not None:
        return ops.int8_matmul
    return MeasuredMatmul()
