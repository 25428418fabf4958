"""CUDA graphs at start: recorded, measured against launching, and reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
import torch

from ...recovery import is_out_of_memory
from .graphs import Bucket, DecodeGraphs, Replay

log = structlog.get_logger("tokenmill.gpu")

WARM_UP_RUNS: Final = 2
"""Before a step is recorded: kernels compile and libraries make their work spaces."""
MEASURED_RUNS: Final = 5


class CudaRecorder:
    """Records steps as CUDA graphs that share one pool of memory.

    Args:
        device: Where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], torch.Tensor]) -> Replay:
        """Warms a step up on a stream of its own, then captures it."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                step()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


class Gain(msgspec.Struct, frozen=True):
    """What a graph saves in one bucket."""

    rows: int
    context: int
    """Tokens that each row attended over while it was measured."""
    launched_ms: float
    """The padded step, kernel by kernel."""
    replayed_ms: float

    @property
    def speedup(self) -> float:
        """How many times faster the replay is."""
        return self.launched_ms / self.replayed_ms if self.replayed_ms else 0.0


def capture_and_measure(
    graphs: DecodeGraphs, buckets: tuple[Bucket, ...], device: torch.device
) -> tuple[Gain, ...]:
    """Records every bucket and logs what each gains.

    Where memory runs out or a model cannot be captured, the rest is left to launching,
    and the log says so.

    Args:
        graphs: To be filled.
        buckets: The largest first.
        device: Where the model is.

    Returns:
        The gains of the shortest contexts' buckets, by rows.
    """
    recorded: list[Bucket] = []
    for bucket in buckets:
        try:
            graphs.capture((bucket,))
        except RuntimeError as error:
            reason = "out of memory" if is_out_of_memory(error) else str(error)
            log.warning(
                "cuda_graph_refused", rows=bucket.rows, context=bucket.context,
                reason=reason, instead="kernels are launched one by one",
            )  # fmt: skip
            if not is_out_of_memory(error):
                break
            continue
        recorded.append(bucket)
    shortest = min((bucket.context for bucket in recorded), default=0)
    gains = tuple(
        _measure(graphs, bucket, device)
        for bucket in sorted(recorded)
        if bucket.context == shortest
    )
    for gain in gains:
        log.info(
            "cuda_graph_gain", rows=gain.rows, context=gain.context,
            launched_ms=round(gain.launched_ms, 3),
            replayed_ms=round(gain.replayed_ms, 3), speedup=round(gain.speedup, 2),
        )  # fmt: skip
    return gains


def _measure(graphs: DecodeGraphs, bucket: Bucket, device: torch.device) -> Gain:
    context = graphs.fill_half(bucket)  # attention over one token would cost nothing
    return Gain(
        bucket.rows,
        context,
        _milliseconds(graphs.step(bucket), device),
        _milliseconds(graphs.replay(bucket), device),
    )


def _milliseconds(step: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Time of the fastest of some runs, waiting for the device as a step does."""
    best = float("inf")
    for _ in range(MEASURED_RUNS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        step()
        torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - began) * 1e3)
    return best
