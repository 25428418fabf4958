"""A model of transformers with its weights, and the paged store connected to it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ....shared.errors import ModelLoadError
from .attention import IMPLEMENTATION, StepState, attach, register
from .calibration.tuning import Tuning
from .checkpoint import CheckpointReader
from .device import Target, place_buffers
from .embedding import halve_embedding
from .families import Family
from .gpu.device_slots import device_maker
from .gpu.offload import Homes, module_bytes, resident_layers
from .gpu.offload import attach as attach_offload
from .placing import Groups, Maker, Placed, is_linear, place_linears
from .quantize import EmptyLinear, Weights
from .rope import LENGTH_DEPENDENT, PackedRotary, rope_type
from .sizes import precision_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..parallel.communicator import Communicator
    from ..parallel.shard import Shard
    from ..parallel.sharding import Sharding
    from .cache import Progress


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is to be loaded."""

    weights: Weights
    target: Target
    fused: bool = True
    """Merge projections for the fused decoder, where the family has one."""
    threshold: float = 0.0
    """bitsandbytes' dynamic threshold, for "int8-bnb"."""
    room: int | None = None
    """Bytes for weights on the device; None is no bound."""
    offload_layers: int | None = None
    """Last decoder layers that stay in host memory; None is those beyond `room`."""
    tuning: Tuning = field(default_factory=Tuning)
    """What calibration, or the weights alone, say is to be changed in them."""
    communicator: Communicator | None = None
    """The rank's end of its group; None loads the whole model."""

    @property
    def shard(self) -> Shard | None:
        """Which rank's part to load; None is the whole model."""
        return None if self.communicator is None else self.communicator.shard


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model with its weights, attention still its own."""

    path: Path
    family: Family
    config: PreTrainedConfig
    options: LoadOptions
    model: PreTrainedModel
    homes: Homes
    merged: bool
    """Its projections are merged for the fused decoder."""

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        return layers_of(self.model, self.family)


def read_model(
    path: Path,
    family: Family,
    config: PreTrainedConfig,
    options: LoadOptions,
    groups: Groups,
    progress: Progress,
) -> Checkpoint:
    """Returns the model with its weights, attention still its own.

    Args:
        path: The checkpoint.
        family: Its family.
        config: Its configuration.
        options: Precision and device.
        groups: Layers to merge.
        progress: Told the fraction of tensors that are in place.

    Raises:
        ModelLoadError: The configuration describes no model, or weights are missing,
            damaged or too large.
    """
    model = skeleton(path, family, config)
    sharding = None
    if options.shard is not None:
        from ..parallel.sharding import Sharding

        sharding = Sharding(config, options.shard)
        sharding.narrow(model, family)
    homes = _homes(model, family, options)
    if homes.offloaded:
        groups = {}  # hooks act on modules, which the fused decoder goes around
    placed = _place(model, options, groups, homes)
    _reader(model, placed, options, homes, sharding).read(path, progress)
    for module in model.modules():
        if isinstance(module, EmptyLinear):
            module.settle()
    if config.tie_word_embeddings and not placed:
        model.tie_weights()
    if precision_of(options.weights) in ("int8", "nf4"):
        halve_embedding(model)
    place_buffers(model, homes)
    attach_offload(layers_of(model, family), homes, options.target.device)
    if sharding is not None and options.communicator is not None:
        sharding.connect(model, options.communicator)
    return Checkpoint(path, family, config, options, model, homes, bool(groups))


def _reader(
    model: PreTrainedModel,
    placed: dict[str, Placed],
    options: LoadOptions,
    homes: Homes,
    sharding: Sharding | None,
) -> CheckpointReader:
    return CheckpointReader(
        model,
        placed,
        options.target.dtype,
        # A rank's parts are in memory of their own already.
        copy=options.weights in ("int8", "int8-a8", "int8-bnb", "nf4")
        and sharding is None,
        home=homes,
        folds=options.tuning.folds,
        sharding=sharding,
    )


def skeleton(path: Path, family: Family, config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a model on the meta device, where parameters are shapes alone.

    Args:
        path: The checkpoint, for messages.
        family: Its family.
        config: Its configuration.

    Raises:
        ModelLoadError: The configuration describes no model of the family.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights
    from transformers.utils import logging as transformers_logging

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
                    f"{path}/config.json describes no {family.model_type} model "
                    f"({type(error).__name__}: {error})"
                ) from error
    model.eval()
    model.requires_grad_(requires_grad=False)
    return model


def _homes(model: PreTrainedModel, family: Family, options: LoadOptions) -> Homes:
    """Decides which layers stay in host memory."""
    layers = layers_of(model, family)
    resident = len(layers)
    if options.offload_layers is not None:
        resident = max(0, len(layers) - options.offload_layers)
    elif options.room is not None:
        dtype = options.target.dtype
        sizes = [module_bytes(layer, options.weights, dtype) for layer in layers]
        rest = module_bytes(model, options.weights, dtype) - sum(sizes)
        resident = resident_layers(sizes, options.room - rest)
    return Homes(
        options.target.device, family.layers, len(layers), resident, options.weights
    )


def _place(
    model: PreTrainedModel, options: LoadOptions, groups: Groups, homes: Homes
) -> dict[str, Placed]:
    maker: Maker | None = None
    if options.target.is_accelerator or options.weights in ("int8-a8", "int8-bnb"):
        maker = device_maker(
            options.weights,
            options.target,
            homes,
            options.tuning,
            threshold=options.threshold,
            merged=bool(groups),
        )
        if maker is None:
            return {}
    return place_linears(model, options.weights, groups, maker, options.tuning)


def connect_attention(checkpoint: Checkpoint, state: StepState) -> None:
    """Makes every layer attend over the paged store.

    Args:
        checkpoint: Changed in place.
        state: The store and the running step.
    """
    model, family = checkpoint.model, checkpoint.family
    # The setter's own check refuses a change after the model is made.
    model.config._attn_implementation = IMPLEMENTATION  # noqa: SLF001
    for layer in checkpoint.layers:
        attention = getattr(layer, family.attention)
        if family.model_type == "falcon":
            from .falcon import PagedFalconAttention

            first = first_query(checkpoint)
            paged = PagedFalconAttention(attention, state, first_head=first)
            setattr(layer, family.attention, paged)
        else:
            attach(attention, state)
    if rope_type(model.config) in LENGTH_DEPENDENT:
        base = model.base_model
        base.rotary_emb = PackedRotary(base.rotary_emb, state)


def first_query(checkpoint: Checkpoint) -> int:
    """Returns which of the whole model's query heads is the first one here."""
    if checkpoint.options.shard is None:
        return 0
    from ..parallel.shard import heads_of

    return heads_of(checkpoint.config, checkpoint.options.shard).queries[0]


def layers_of(model: PreTrainedModel, family: Family) -> list[nn.Module]:
    """Returns a model's decoder layers."""
    return list(model.get_submodule(family.layers).children())


def first_linear(checkpoint: Checkpoint) -> nn.Module:
    """Returns the first layer's first linear module, where rows are counted."""
    for module in checkpoint.layers[0].modules():
        if is_linear(module) or isinstance(module, EmptyLinear):
            return module
    family = checkpoint.family.model_type
    raise ModelLoadError(f"the first layer of {family} has no linear layer")
