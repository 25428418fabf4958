"""Prepares a GPU's runner at start: products are measured, decode steps recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import structlog
import torch

from ..rope import LENGTH_DEPENDENT, rope_type
from .graphs import Buckets, DecodeGraphs, DecodeInputs, PlaceLayout, Recorder
from .warm_up import warm_up

if TYPE_CHECKING:
    from ..assembly import Checkpoint
    from ..runner import TransformersRunner

log = structlog.get_logger("tokenmill.gpu")


class GraphOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner is prepared for."""

    max_running: int
    """Most sequences of a step."""
    step_tokens: int
    """Most tokens of a step."""
    enabled: bool = True
    """False records no steps; the rest is done all the same."""


def decode_graphs(
    runner: TransformersRunner, max_running: int, recorder: Recorder
) -> tuple[DecodeGraphs, Buckets]:
    """Returns graphs for a runner's decode steps, none of them recorded yet.

    Args:
        runner: Its pool has a scratch block behind the blocks of sequences.
        max_running: Most sequences of a step.
        recorder: Makes the graphs.
    """
    tokens = runner.num_blocks * runner.block_size
    buckets = Buckets(max_running, min(runner.max_context, tokens))
    inputs = DecodeInputs(
        buckets,
        runner.block_size,
        runner.num_blocks,
        runner.target.device,
        _static_layout(),
    )
    return DecodeGraphs(buckets, inputs, runner.forward, recorder), buckets


def _static_layout() -> PlaceLayout:
    from ...kernels.triton.layout import static_layout

    return static_layout


def add_graphs(
    runner: TransformersRunner, checkpoint: Checkpoint, options: GraphOptions | None
) -> None:
    """Measures integer products, warms up, then records decode steps, on a GPU.

    Args:
        runner: Given its graphs.
        checkpoint: The runner's model.
        options: None leaves the runner as it is.
    """
    if options is None or runner.target.device.type != "cuda":
        return
    _prepare_products(checkpoint, options)
    communicator = checkpoint.options.communicator
    if communicator is not None:
        communicator.numbers(0)  # products are measured at unequal speed
    warm_up(
        runner, options.step_tokens, options.max_running, alone=communicator is None
    )
    reason = _why_not(checkpoint, options)
    if reason is not None:
        log.info("cuda_graphs_off", reason=reason)
        return
    from .cuda_graphs import CudaRecorder, capture_and_measure

    device = runner.target.device
    with torch.inference_mode():
        graphs, buckets = decode_graphs(
            runner, options.max_running, CudaRecorder(device)
        )
        gains = capture_and_measure(graphs, buckets.all(), device)
    if gains:
        runner.graphs = graphs
        runner.graph_gains = gains


def _why_not(checkpoint: Checkpoint, options: GraphOptions) -> str | None:
    """Returns what keeps steps from being recorded, or None."""
    if not options.enabled:
        return "worker.cuda_graphs is off"
    if checkpoint.options.shard is not None:
        return "ranks meet in every layer, and a recorded step cannot notice a lost one"
    if checkpoint.homes.offloaded:
        return "layers in host memory are copied in every step"
    if rope_type(checkpoint.config) in LENGTH_DEPENDENT:
        return "the model's RoPE looks at the lengths of the step's sequences"
    if checkpoint.options.threshold > 0:
        return "bitsandbytes' dynamic threshold looks at the values of the step"
    return None


def _prepare_products(checkpoint: Checkpoint, options: GraphOptions) -> None:
    """Measures the integer product of every shape that will occur."""
    if checkpoint.options.weights != "int8-a8":
        return
    from .int8 import DeviceInt8Linear
    from .linear import MeasuredMatmul

    matmul: MeasuredMatmul | None = None
    for module in checkpoint.model.modules():
        if not isinstance(module, DeviceInt8Linear):
            continue
        if isinstance(module.matmul, MeasuredMatmul):
            module.matmul.prepare([module.weight], options.step_tokens)
            matmul = module.matmul
    if matmul is not None:
        log.info("int8_products_chosen", products=matmul.report())
