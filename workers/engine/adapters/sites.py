"""Where in a loaded model adapters act: its linear layers, merged ones included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ....shared.errors import ModelLoadError
from ..model.llama_fused import merged_layers
from ..model.placing import features, is_linear
from ..model.quantize import EmptyLinear, Int8Linear
from ..parallel.cuts import find_cut, layer_cuts
from ..parallel.layers import summed_part
from .delta import Delta, KernelDelta, TorchDelta
from .targets import BaseLinears, base_linears, prefix_of
from .weights import LoraPair

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..model.assembly import Checkpoint
    from ..model.attention import StepState
    from ..model.calibration.folding import Fold
    from ..model.device import Target
    from ..parallel.cuts import LayerCut

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Part:
    """Output columns of a module that one layer of the checkpoint makes."""

    name: str
    """Dotted name of that layer."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Site:
    """A module that computes one linear layer, or several that share an input."""

    name: str
    """Dotted name of the module."""
    module: nn.Module
    parts: tuple[Part, ...]
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """A loaded model as adapters see it."""

    sites: Mapping[str, Site]
    linears: BaseLinears
    folds: Mapping[str, Fold]
    """What calibration has multiplied into the base's weights, by tensor."""
    target: Target
    state: StepState
    cuts: Mapping[str, LayerCut]
    """Which part of a layer is here, by name; without those that are here whole."""

    def prepare(self, pairs: Mapping[str, LoraPair], path: Path) -> dict[str, Delta]:
        """Returns what to add at each site.

        Args:
            pairs: An adapter's weights by layer, checked against `linears`; of those
                in `cuts`, the parts that are here.
            path: The adapter's directory, for messages.

        Raises:
            ModelLoadError: A weight is too large once it is scaled.
        """
        deltas: dict[str, Delta] = {}
        for site in self.sites.values():
            present = [part for part in site.parts if part.name in pairs]
            if present:
                a, b = self._stacked(site, present, pairs)
                self._require_finite(site, path, a, b)
                deltas[site.name] = self._make(site, a, b)
        return deltas

    def _stacked(
        self, site: Site, parts: list[Part], pairs: Mapping[str, LoraPair]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a [ranks, in] and b [out, ranks] of a site, folded as its weight is.

        The parts' ranks stand below each other in a; in b each part has its own rows
        and its own columns, and all else is zero.
        """
        folded = [self._folded(part.name, pairs[part.name]) for part in parts]
        b = torch.zeros(site.out_features, sum(len(a) for a, _ in folded))
        at = 0
        for part, (a, part_b) in zip(parts, folded, strict=True):
            b[part.start : part.stop, at : at + len(a)] = part_b
            at += len(a)
        return torch.cat([a for a, _ in folded]), b

    def _folded(self, name: str, pair: LoraPair) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a and scale * b with the factors that the layer's weight carries."""
        a, b = pair.a, pair.b * pair.scale
        fold = self.folds.get(f"{name}{_WEIGHT}")
        if fold is not None and fold.columns is not None:
            a = a * fold.columns
        if fold is not None and fold.rows is not None:
            b = b * fold.rows[:, None]
        return a, b

    def _require_finite(self, site: Site, path: Path, *weights: torch.Tensor) -> None:
        """Each value was finite as it was saved, in the saver's type and unscaled."""
        dtype = self.target.dtype
        if not all(bool(torch.isfinite(one.to(dtype)).all()) for one in weights):
            raise ModelLoadError(
                f"{path}: its weights for {site.name}, times lora_alpha / r, are not "
                f"finite in {dtype}; its training diverged, or lora_alpha is wrong"
            )

    def _make(self, site: Site, a: torch.Tensor, b: torch.Tensor) -> Delta:
        if isinstance(site.module, Int8Linear):
            return KernelDelta(a, b)
        return TorchDelta(a, b, self.target)


def adapted_model(checkpoint: Checkpoint, state: StepState) -> AdaptedModel:
    """Finds where adapters act.

    Args:
        checkpoint: A loaded model, connected to its store.
        state: Its running step.
    """
    model, family, options = checkpoint.model, checkpoint.family, checkpoint.options
    groups = merged_layers(model.config.num_hidden_layers) if checkpoint.merged else {}
    cuts = _cuts(checkpoint)
    sites = {
        name: _site(name, module, groups.get(name), model, cuts)
        for name, module in _linears(model, f"{family.layers}.")
    }
    parts = [(part, site) for site in sites.values() for part in site.parts]
    if options.shard is not None:  # whose modules do not know the whole widths
        linears = base_linears(checkpoint.path)
    else:
        linears = BaseLinears(
            origin=str(checkpoint.path),
            prefix=prefix_of(family),
            layers=family.layers,
            shapes={
                part.name: (part.stop - part.start, site.in_features)
                for part, site in parts
            },
        )
    found = {part.name: find_cut(cuts, part.name) for part, _ in parts}
    here = {name: cut for name, cut in found.items() if cut is not None}
    return AdaptedModel(
        sites, linears, options.tuning.folds, options.target, state, here
    )


def _cuts(checkpoint: Checkpoint) -> dict[str, LayerCut]:
    """Returns a rank's parts of layers by the ends of their names; else nothing."""
    shard = checkpoint.options.shard
    return {} if shard is None else layer_cuts(checkpoint.config, shard)


def _linears(model: nn.Module, start: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the linear layers whose names begin with `start`, outermost ones only.

    Of one whose outputs are summed over ranks it is the rank's own part: what is added
    to that is in the sum.
    """
    inside = "\0"  # begins no name
    for name, module in model.named_modules():
        if not name.startswith(start) or name.startswith(inside):
            continue
        own = summed_part(module)
        if isinstance(own, EmptyLinear) or is_linear(own):
            inside = f"{name}."  # a quantized layer may hold another one
            yield name, own


def _site(
    name: str,
    module: nn.Module,
    members: tuple[str, ...] | None,
    model: PreTrainedModel,
    cuts: Mapping[str, LayerCut],
) -> Site:
    if isinstance(module, EmptyLinear):
        inputs, outputs = module.in_features, module.out_features
    else:
        inputs, outputs = features(module)
    if members is None:
        return Site(name, module, (Part(name, 0, outputs),), inputs, outputs)
    parts, start = [], 0
    widths = _widths(outputs, members, model, cuts)
    for member, width in zip(members, widths, strict=True):
        parts.append(Part(member, start, start + width))
        start += width
    return Site(name, module, tuple(parts), inputs, outputs)


def _widths(
    outputs: int,
    members: tuple[str, ...],
    model: PreTrainedModel,
    cuts: Mapping[str, LayerCut],
) -> tuple[int, ...]:
    """Returns how many rows of a merged layer each member has."""
    here = [cut.width for name in members if (cut := find_cut(cuts, name))]
    if here:
        return tuple(here)
    if len(members) == 2:  # gate and up
        return outputs // 2, outputs // 2
    from ..model.families import kv_shape

    shape = kv_shape(model.config)
    keys = shape.num_kv_heads * shape.head_dim
    return outputs - 2 * keys, keys, keys
