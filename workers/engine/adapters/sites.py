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
from .delta import Delta, KernelDelta, TorchDelta
from .targets import BaseLinears, prefix_of
from .weights import LoraPair

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..model.assembly import Checkpoint
    from ..model.attention import StepState
    from ..model.calibration.folding import Fold
    from ..model.device import Target

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

    def prepare(self, pairs: Mapping[str, LoraPair], path: Path) -> dict[str, Delta]:
        """Returns what to add at each site.

        Args:
            pairs: An adapter's weights by layer, checked against `linears`.
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
    model, family = checkpoint.model, checkpoint.family
    groups = merged_layers(model.config.num_hidden_layers) if checkpoint.merged else {}
    sites = {
        name: _site(name, module, groups.get(name), model)
        for name, module in _linears(model, f"{family.layers}.")
    }
    shapes = {
        part.name: (part.stop - part.start, site.in_features)
        for site in sites.values()
        for part in site.parts
    }
    linears = BaseLinears(
        origin=str(checkpoint.path),
        prefix=prefix_of(family),
        layers=family.layers,
        shapes=shapes,
    )
    wish = checkpoint.wish
    return AdaptedModel(sites, linears, wish.tuning.folds, wish.target, state)


def _linears(model: nn.Module, start: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the linear layers whose names begin with `start`, outermost ones only."""
    inside = "\0"  # begins no name
    for name, module in model.named_modules():
        if not name.startswith(start) or name.startswith(inside):
            continue
        if isinstance(module, EmptyLinear) or is_linear(module):
            inside = f"{name}."  # a quantized layer may hold another one
            yield name, module


def _site(
    name: str,
    module: nn.Module,
    members: tuple[str, ...] | None,
    model: PreTrainedModel,
) -> Site:
    if isinstance(module, EmptyLinear):
        inputs, outputs = module.in_features, module.out_features
    else:
        inputs, outputs = features(module)
    if members is None:
        return Site(name, module, (Part(name, 0, outputs),), inputs, outputs)
    parts, start = [], 0
    for member, width in zip(members, _widths(outputs, members, model), strict=True):
        parts.append(Part(member, start, start + width))
        start += width
    return Site(name, module, tuple(parts), inputs, outputs)


def _widths(
    outputs: int, members: tuple[str, ...], model: PreTrainedModel
) -> tuple[int, ...]:
    """Returns how many rows of a merged layer each member has."""
    if len(members) == 2:  # gate and up
        return outputs // 2, outputs // 2
    from ..model.families import kv_shape

    shape = kv_shape(model.config)
    keys = shape.num_kv_heads * shape.head_dim
    return outputs - 2 * keys, keys, keys
