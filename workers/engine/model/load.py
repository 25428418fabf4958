"""From a checkpoint directory to a runner that serves it."""

from __future__ import annotations

import atexit
import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from ....shared.errors import ModelLoadError
from ..kernels import ops
from ..kv.store import KVKind, KVStore
from .attention import IMPLEMENTATION, StepState, attach, register
from .budget import pool_blocks
from .checkpoint import CheckpointReader
from .families import Family, family_of, kv_shape
from .identity import eos_token_ids, weights_version
from .lean_import import import_transformers
from .llama_fused import FusedLlamaDecoder, merged_layers
from .placing import Groups, is_linear, place_linears
from .quantize import FloatLinear, Int8Linear, Nf4Linear, Weights
from .rope import LENGTH_DEPENDENT, PackedRotary, context_limit, rope_type
from .runner import Decoder, GenericDecoder, RowCounter, TransformersRunner

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from .cache import Progress

log = structlog.get_logger("tokenmill.model")


def load_runner(
    path: Path,
    *,
    weights: Weights = "int8",
    kv: KVKind = "int8",
    block_size: int = 8,
    num_blocks: int | None = None,
    kv_memory_mb: int = 1024,
    max_context: int | None = None,
    threads: int | None = None,
    device: str = "auto",
    fused: bool = True,
    progress: Progress | None = None,
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
        max_context: Cap on a sequence's tokens; None is the model's own limit.
        threads: Compute threads; None is the number of cores this process may use.
        device: "auto" or "cpu".
        fused: Use the fused decoder where the family has one.
        progress: Called with the stage and its fraction done.

    Returns:
        A runner with its pool allocated.

    Raises:
        ModelLoadError: Unsupported architecture or device, missing or damaged files, or
            not enough memory.
    """
    _check_device(device)
    with _collector_paused():
        _use_threads(threads, weights)
        checkpoint = _read(path, weights, fused=fused, progress=progress)
        shape = kv_shape(checkpoint.config)
        num_blocks = num_blocks or pool_blocks(
            shape, kind=kv, block_size=block_size, kv_memory_mb=kv_memory_mb
        )
        store = KVStore(shape, num_blocks=num_blocks, block_size=block_size, kind=kv)
        return _runner(checkpoint, store, max_context)


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


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A model with its weights, attention still its own."""

    path: Path
    family: Family
    config: PreTrainedConfig
    weights: Weights
    model: PreTrainedModel
    fused: bool
    """Its layers are merged for the fused decoder."""


def _read(
    path: Path, weights: Weights, *, fused: bool, progress: Progress | None
) -> _Checkpoint:
    family = family_of(path)
    import_transformers()
    config = family.load_config(path)
    fuse = fused and family.llama_pattern and weights in ("int8", "float32")
    groups = merged_layers(config.num_hidden_layers) if fuse else {}
    model = _read_model(path, family, config, weights, groups, progress)
    return _Checkpoint(path, family, config, weights, model, fuse)


def _runner(
    checkpoint: _Checkpoint, store: KVStore, max_context: int | None
) -> TransformersRunner:
    """Connects a model to its KV store."""
    model, family, config = checkpoint.model, checkpoint.family, checkpoint.config
    state = StepState(store.layers)
    _connect_attention(model, family, state)
    counter = RowCounter()
    if checkpoint.fused:
        decoder: Decoder = FusedLlamaDecoder(model, state, counter.add)
    else:
        decoder = GenericDecoder(model)
        counter.watch(_first_linear(model, family))
    runner = TransformersRunner(
        model,
        decoder,
        store,
        state,
        counter,
        max_context=_context(config, max_context),
        eos_token_ids=eos_token_ids(checkpoint.path, config),
        weights_version=weights_version(
            checkpoint.path, checkpoint.weights, store.kind
        ),
    )
    log.info(
        "model_loaded",
        path=str(checkpoint.path),
        family=family.model_type,
        weights=checkpoint.weights,
        kv=store.kind,
        decoder=type(decoder).__name__,
        kv_blocks=store.num_blocks,
        kv_mib=store.nbytes >> 20,
    )
    return runner


def _check_device(device: str) -> None:
    if device not in ("auto", "cpu"):
        raise ModelLoadError(
            f"device {device!r} is not supported by this build; use 'cpu' or 'auto'"
        )


def _use_threads(threads: int | None, weights: Weights) -> None:
    cores = threads or available_cores()
    # INT8 linears are the kernels' work; all others are torch's.
    ops.set_num_threads(cores, torch_threads=None if weights == "int8" else cores)


def available_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_model(
    path: Path,
    family: Family,
    config: PreTrainedConfig,
    weights: Weights,
    groups: Groups,
    progress: Progress | None,
) -> PreTrainedModel:
    """Returns the model with its weights, attention still its own."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights
    from transformers.utils import logging as transformers_logging

    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
    register()
    # Its advice is for training and for padded batches; errors are raised anyway.
    transformers_logging.set_verbosity_error()
    config._attn_implementation = "eager"  # noqa: SLF001  (set by transformers, too)
    model_class = family.load_class()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about training, which does not happen here
        # Drawing weights on the meta device would import torch's compiler.
        with init_empty_weights(include_buffers=False), no_init_weights():
            try:
                model = model_class(config)
            except Exception as error:  # of any kind: the values are from a file
                raise ModelLoadError(
                    f"{path}/config.json describes no {family.model_type} model: "
                    f"{error}"
                ) from error
    model.eval()
    model.requires_grad_(requires_grad=False)
    placed = place_linears(model, weights, groups)
    reader = CheckpointReader(model, placed, dtype, copy=weights in ("int8", "nf4"))
    reader.read(path, progress or _silent)
    if config.tie_word_embeddings and not placed:
        model.tie_weights()
    return model


def _connect_attention(
    model: PreTrainedModel, family: Family, state: StepState
) -> None:
    """Makes every layer attend over the paged store."""
    # The setter's own check refuses a change after the model is made.
    model.config._attn_implementation = IMPLEMENTATION  # noqa: SLF001
    for layer in _layers(model, family):
        attention = getattr(layer, family.attention)
        if family.model_type == "falcon":
            from .falcon import PagedFalconAttention

            setattr(layer, family.attention, PagedFalconAttention(attention, state))
        else:
            attach(attention, state)
    if rope_type(model.config) in LENGTH_DEPENDENT:
        base = model.base_model
        base.rotary_emb = PackedRotary(base.rotary_emb, state)


def _layers(model: PreTrainedModel, family: Family) -> list[nn.Module]:
    return list(model.get_submodule(family.layers).children())


def _first_linear(model: PreTrainedModel, family: Family) -> nn.Module:
    slots = (Int8Linear, Nf4Linear, FloatLinear)
    for module in _layers(model, family)[0].modules():
        if is_linear(module) or isinstance(module, slots):
            return module
    raise ModelLoadError(f"the first layer of {family.model_type} has no linear layer")


def _context(config: PreTrainedConfig, cap: int | None) -> int:
    limit = context_limit(config)
    if cap is not None and cap > limit:
        log.warning("max_context_lowered", asked=cap, model_limit=limit)
    return min(limit, cap or limit)


def _silent(_stage: str, _fraction: float) -> None:
    """Progress that nobody watches."""
