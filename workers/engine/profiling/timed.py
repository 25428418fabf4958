"""An engine, a runner and kernels that keep time."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

import torch

from ....shared.errors import EngineError
from ..batch import StepBatch
from ..engine import Engine, Outcome
from ..kernels.backends import Backend, surround
from ..kernels.composed import Composed, LlamaLayerWeights
from ..kernels.layout import KVLayer, PackedWeight, StepLayout
from ..planner import Plan, num_tokens
from ..request import StepOutput
from ..sampler import Sampled, SampleRows
from ..sampling_rows import SamplingRow
from .recorder import Recorder

if TYPE_CHECKING:
    from ..model.runner import TransformersRunner

P = ParamSpec("P")
T = TypeVar("T")
_KERNELS: Final = ("linear", "kv_write", "paged_attention")
"""What a set of kernels for a GPU has beyond torch's own operations."""


class TimedEngine(Engine):
    """An engine whose steps are recorded, phase by phase, after `time_into`."""

    _recorder: Recorder
    _planned: Plan = ()

    def time_into(self, recorder: Recorder) -> None:
        """Records every step from now on."""
        self._recorder = recorder
        self._sample = _timed_sampling(self._sample, recorder)

    def step(self) -> StepOutput:
        """Runs one step and records it."""
        self._recorder.begin()
        try:
            return super().step()
        finally:
            planned, self._planned = self._planned, ()
            self._recorder.end(num_tokens(planned), len(planned))

    def _plan(self) -> Plan:
        with self._recorder.phase("plan"):
            self._planned = super()._plan()
        return self._planned

    def _deliver(self, outcomes: Iterable[Outcome]) -> StepOutput:
        with self._recorder.phase("deliver"):
            return super()._deliver(outcomes)


def _timed_sampling(call: SampleRows, recorder: Recorder) -> SampleRows:
    def timed(
        logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> list[Sampled | EngineError]:
        with recorder.phase("sampling"):
            return call(logits, rows)

    return timed


class TimedRunner:
    """Times the model's part of each step; everything else is the runner's own.

    Args:
        runner: A loaded model.
        recorder: Where to.
    """

    def __init__(self, runner: "TransformersRunner", recorder: Recorder) -> None:
        self._runner = runner
        self._recorder = recorder

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Runs the model. A detailed step launches its kernels, whatever graphs are."""
        runner = self._runner
        graphs = runner.graphs
        if self._recorder.detail:
            runner.graphs = None
        try:
            with self._recorder.phase("model"):
                logits = runner.run(batch)
                if logits.is_cuda:  # else only the launches would be timed
                    torch.cuda.synchronize(logits.device)
                return logits
        finally:
            runner.graphs = graphs


class TimedBackend(Composed):
    """A CPU's kernels, each timed in a detailed step, untouched in all others.

    In a detailed step a decoder layer is made of separate kernels, which give the same
    bits as the one call that it is otherwise.

    Args:
        inner: The kernels in force.
        recorder: Where to.
    """

    def __init__(self, inner: Backend, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder
        self.name = inner.name
        self.quantize_weight = inner.quantize_weight
        self.set_num_threads = inner.set_num_threads

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `reference.linear`."""
        name = _linear_name(weight)
        return self._timed(name, self._inner.linear, x, weight, bias)

    def kv_write(
        self, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, layout: StepLayout
    ) -> None:
        """See `reference.kv_write`."""
        self._timed("kv_write", self._inner.kv_write, k, v, layer, layout)

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
        call = partial(self._inner.paged_attention, q, layer, layout, scale=scale)
        call = partial(call, window=window, alibi=alibi, softcap=softcap)
        return self._timed("attention", call)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """See `Composed.rms_norm`."""
        return self._timed("rms_norm", self._inner.rms_norm, x, weight, epsilon)

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Composed.silu_multiply`."""
        return self._timed("silu_multiply", self._inner.silu_multiply, gate_up)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """See `Composed.rotate`."""
        self._timed("rotate", self._inner.rotate, x, cos, sin)

    def llama_layer(
        self,
        x: torch.Tensor,
        weights: LlamaLayerWeights,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: KVLayer,
        layout: StepLayout,
    ) -> None:
        """See `ops.llama_layer`."""
        if self._recorder.detail:
            super().llama_layer(x, weights, cos, sin, layer, layout)
        else:
            self._inner.llama_layer(x, weights, cos, sin, layer, layout)

    def _timed(
        self, name: str, call: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> T:
        if not self._recorder.detail:
            return call(*args, **options)
        began = time.perf_counter_ns()
        result = call(*args, **options)
        self._recorder.add("kernel", name, began)
        return result


def _linear_name(weight: PackedWeight) -> str:
    return f"linear {weight.in_features}x{weight.out_features}"


def time_kernels(runner: "TransformersRunner", recorder: Recorder) -> None:
    """Puts clocks around the kernels that a model calls.

    Args:
        runner: A loaded model.
        recorder: Where to.
    """
    if not runner.target.is_accelerator:
        surround(lambda inner: TimedBackend(inner, recorder))
        return
    ops = runner.target.ops
    for name in _KERNELS:
        setattr(ops, name, _on_device(getattr(ops, name), name, recorder))


def _on_device(call: Callable[P, T], name: str, recorder: Recorder) -> Callable[P, T]:
    """A GPU's kernel that is waited for in a detailed step, so that it can be timed."""

    def timed(*args: P.args, **options: P.kwargs) -> T:
        if not recorder.detail:
            return call(*args, **options)
        _wait()
        began = time.perf_counter_ns()
        result = call(*args, **options)
        _wait()
        packed: list[PackedWeight] = [a for a in args if isinstance(a, PackedWeight)]
        shown = _linear_name(packed[0]) if packed else name.removeprefix("paged_")
        recorder.add("kernel", shown, began)
        return result

    return timed


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
