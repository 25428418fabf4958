"""From a checkpoint directory to a runner that serves it."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
import torch

from ....shared.errors import ModelLoadError
from ..kernels import ops as host_ops
from ..kv.store import KVKind, KVStore
from .assembly import (
    Checkpoint,
    LoadOptions,
    connect_attention,
    first_linear,
    read_model,
)
from .attention import StepState
from .budget import trim_heap
from .calibration.tuning_choice import CalibrationChoice, choose_tuning
from .device import Target, choose_target
from .families import family_of
from .gpu.graph_start import GraphOptions, add_graphs
from .identity import eos_token_ids, weights_version
from .lean_import import import_transformers
from .llama_fused import FusedLlamaDecoder, merged_layers
from .placing import members_of
from .pooling import PoolOptions, make_pool, scratch_blocks, weights_room
from .quantize import Weights
from .room_check import check_room
from .rope import context_limit
from .runner import Decoder, GenericDecoder, RowCounter, TransformersRunner

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..parallel.communicator import Communicator
    from .cache import Progress

log = structlog.get_logger("tokenmill.model")
_SAME_DIGITS = 15
"""Hexadecimal digits of a version that ranks compare: 60 bits."""


def load_runner(
    path: Path,
    *,
    weights: Weights = "int8",
    kv: KVKind = "int8",
    block_size: int = 8,
    num_blocks: int | None = None,
    kv_memory_mb: int = 1024,
    apart_mb: int = 0,
    max_context: int | None = None,
    threads: int | None = None,
    device: str | Target = "auto",
    fused: bool = True,
    outlier_threshold: float = 0.0,
    offload_layers: int | None = None,
    graphs: GraphOptions | None = None,
    calibration: CalibrationChoice = "auto",
    progress: Progress | None = None,
    communicator: Communicator | None = None,
) -> TransformersRunner:
    """Loads a checkpoint for serving.

    Args:
        path: Directory with config.json and safetensors.
        weights: Precision of linear layers. With kv="float32", "float32" is the exact
            mode.
        kv: Precision of the KV pool.
        block_size: Tokens per KV block.
        num_blocks: KV blocks; None sizes the pool from free memory.
        kv_memory_mb: Upper bound of the pool in MiB when it is sized from free memory.
        apart_mb: MiB of free memory that the pool leaves besides its margin.
        max_context: Cap on a sequence's tokens; None is the model's own limit.
        threads: Compute threads; None is the number of cores this process may use.
        device: "cpu", "cuda", "auto" for a GPU where there is one, or a target made
            by the caller.
        fused: Use the fused decoder where the family has one.
        outlier_threshold: With weights="int8-bnb", bitsandbytes' dynamic threshold;
            above 0 a request's tokens depend on its batch.
        offload_layers: Last decoder layers that a GPU leaves in host memory; None is
            as many as do not fit.
        graphs: Decode steps to record as CUDA graphs; None is none.
        calibration: Of these weights; "auto" takes the one beside the checkpoint, in
            the cache or shipped, else scales from the weights; None changes nothing.
        progress: Called with the stage and its fraction done.
        communicator: Of a rank, which then holds its part of the model alone, and of
            the KV pool; every rank of the group has to load it. None is all of it.

    Returns:
        A runner with its pool allocated.

    Raises:
        ModelLoadError: Unsupported architecture or device, missing or damaged files, or
            not enough memory.
    """
    chosen = choose_target(device, weights) if isinstance(device, str) else device
    if communicator is not None and communicator.size == 1:
        communicator = None
    shard = None if communicator is None else communicator.shard
    pool = PoolOptions(
        block_size=block_size,
        num_blocks=num_blocks,
        kv_memory_mb=kv_memory_mb // (shard.size if shard else 1),
        apart_mb=apart_mb,
    )
    options = LoadOptions(
        weights=weights,
        target=chosen,
        fused=fused,
        threshold=outlier_threshold,
        room=weights_room(chosen, path, kv, pool, shard),
        offload_layers=offload_layers,
        communicator=communicator,
    )
    with _collector_paused():
        _use_threads(threads, weights, chosen)
        checkpoint = _read(path, options, kv, pool, calibration, progress)
        trim_heap()  # before the pool is sized by what is free
        runner = _runner(checkpoint, make_pool(checkpoint, kv, pool), max_context)
        add_graphs(runner, checkpoint, graphs)
        return runner


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses garbage collection: imports and weights make much and drop little.

    A start is a second shorter for it, and what was made is then left out of every
    later collection, since it lives as long as the process.
    """
    enabled = gc.isenabled()
    gc.collect()  # garbage of now must not be kept for good by the freeze below
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules complain of what is left
    finally:
        if enabled:
            gc.enable()


def _read(
    path: Path,
    options: LoadOptions,
    kv: KVKind,
    pool: PoolOptions,
    calibration: CalibrationChoice,
    progress: Progress | None,
) -> Checkpoint:
    family = family_of(path)
    import_transformers()
    config = family.load_config(path)
    if options.shard is not None:
        from ..parallel.shard import check_degree

        check_degree(config, options.shard.size)
    fuse = options.fused and family.llama_pattern and _fusible(options)
    groups = merged_layers(config.num_hidden_layers) if fuse else {}
    check_room(path, config, options, kv, pool, members_of(groups))
    tuning = choose_tuning(
        path,
        family,
        config,
        weights=options.weights,
        kv=kv,
        choice=calibration,
        fused=fuse,
        half=options.target.dtype.itemsize == 2,
        shard=options.shard,
    )
    options = replace(options, tuning=tuning)
    return read_model(path, family, config, options, groups, progress or _silent)


def _fusible(options: LoadOptions) -> bool:
    if options.offload_layers:
        return False
    return options.target.is_accelerator or options.weights in ("int8", "float32")


def _runner(
    checkpoint: Checkpoint, store: KVStore, max_context: int | None
) -> TransformersRunner:
    """Connects a model to its KV store."""
    model, options = checkpoint.model, checkpoint.options
    state = StepState(store.layers, options.target.ops)
    connect_attention(checkpoint, state)
    counter = RowCounter()
    if checkpoint.merged:
        decoder: Decoder = FusedLlamaDecoder(model, state, counter.add)
    else:
        decoder = GenericDecoder(model)
        counter.watch(first_linear(checkpoint))
    runner = TransformersRunner(
        model,
        decoder,
        store,
        state,
        counter,
        options.target,
        scratch_blocks=scratch_blocks(options.target),
        max_context=_context(checkpoint.config, max_context),
        eos_token_ids=eos_token_ids(checkpoint.path, checkpoint.config),
        weights_version=_version(checkpoint, store.kind),
    )
    runner.base = checkpoint, state
    log.info(
        "model_loaded",
        path=str(checkpoint.path),
        family=checkpoint.family.model_type,
        weights=_precision(options),
        kv=store.kind,
        calibration=options.tuning.source,
        device=options.target.name,
        decoder=type(decoder).__name__,
        **(msgspec.structs.asdict(options.shard) if options.shard else {}),
        kv_blocks=runner.num_blocks,
        kv_mib=store.nbytes >> 20,
    )
    return runner


def _precision(options: LoadOptions) -> str:
    threshold = options.threshold
    return f"{options.weights}>{threshold}" if threshold else options.weights


def _version(checkpoint: Checkpoint, kv: KVKind) -> str:
    """Names whatever changes a token: weights, their precision and tuning, KV, tp."""
    options = checkpoint.options
    precision, tuning = _precision(options), options.tuning.version
    tuned = f"{precision}+{tuning}" if tuning else precision
    version = weights_version(checkpoint.path, tuned, kv)
    _check_same_weights(checkpoint, version)
    return f"{version}+tp{options.shard.size}" if options.shard else version


def _check_same_weights(checkpoint: Checkpoint, version: str) -> None:
    """Refuses parts of different weights: what they add up to would be nonsense."""
    communicator = checkpoint.options.communicator
    if communicator is None:
        return
    if len(set(communicator.numbers(int(version[:_SAME_DIGITS], 16)))) > 1:
        raise ModelLoadError(
            f"{checkpoint.path} or its calibration has changed while the ranks read "
            "it; start the worker again"
        )


def _use_threads(threads: int | None, weights: Weights, target: Target) -> None:
    cores = threads or available_cores()
    if target.is_accelerator:
        torch.set_num_threads(1)  # the host only launches; its loops are short
        return
    # INT8 linears are the kernels' work; all others are torch's.
    host_ops.set_num_threads(cores, torch_threads=None if weights == "int8" else cores)


def available_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _context(config: PreTrainedConfig, cap: int | None) -> int:
    limit = context_limit(config)
    if cap is not None and cap > limit:
        log.warning("max_context_lowered", asked=cap, model_limit=limit)
    return min(limit, cap or limit)


def _silent(_stage: str, _fraction: float) -> None:
    """Progress that nobody watches."""
