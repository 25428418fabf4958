"""Swaps a model's linear layers for empty ones that wait for their weights.

A model starts on the meta device. What is placed here is filled as the checkpoint is
read, so that a float weight lives only while its own layer is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec
import torch
from torch import nn

from ....shared.errors import EngineError
from .calibration.tuning import Tuning
from .quantize import (
    EmptyLinear,
    FloatLinear,
    Int8Linear,
    LinearSlot,
    Nf4Linear,
    Weights,
)

Groups = Mapping[str, tuple[str, ...]]
"""A merged layer's dotted name, and those of the layers whose rows it stacks."""
Slot = type[Int8Linear] | type[Nf4Linear] | type[FloatLinear]
Maker = Callable[[str, int, int], EmptyLinear]
"""(dotted name, in_features, out_features) -> the layer that waits for its weight."""
MAKERS: Mapping[str, Slot] = {
    "int8": Int8Linear,
    "nf4": Nf4Linear,
    "float32": FloatLinear,
}
"""What takes the place of a linear layer, by precision of the weights."""


def members_of(groups: Groups) -> frozenset[str]:
    """Returns the layers that are merged, whose weights are so copied."""
    return frozenset(name for members in groups.values() for name in members)


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer, GPT-2's transposed one included."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def features(module: nn.Module) -> tuple[int, int]:
    """Returns (in_features, out_features) of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = module.get_parameter("weight")  # Conv1D keeps [in, out]
    return weight.shape[0], weight.shape[1]


def has_bias(module: nn.Module) -> bool:
    """Returns whether a linear layer adds a bias."""
    return getattr(module, "bias", None) is not None


def is_transposed(module: nn.Module) -> bool:
    """Returns whether the checkpoint keeps this layer's weight as [in, out]."""
    return type(module).__name__ == "Conv1D"


def linear_names(model: nn.Module) -> Iterator[str]:
    """Yields the dotted names of a model's linear layers, the head included."""
    for name, module in model.named_modules():
        if is_linear(module):
            yield name


class Placed(msgspec.Struct, frozen=True):
    """A slot in the model, and how the checkpoint keeps its weight."""

    slot: LinearSlot
    transposed: bool
    """The checkpoint has [in_features, out_features]."""
    bias: bool = False
    """The model calls for one, so the checkpoint must have it."""


class _Part:
    """The slot of one member of a merged layer; hands on when all have come."""

    def __init__(
        self, whole: _Merged, name: str, in_features: int, out_features: int
    ) -> None:
        self.name = name
        self.in_features = in_features
        self.out_features = out_features
        self._whole = whole
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    def fill(self, weight: torch.Tensor) -> None:
        """Keeps the weight until its neighbours are there."""
        self.weight = weight.float()
        self._whole.try_fill()

    def fill_bias(self, bias: torch.Tensor) -> None:
        """Keeps the bias; the merged layer has zeros where a member has none."""
        self.bias = bias.float().clone()
        self._whole.fill_bias()


class _Merged:
    """Collects members' weights, which share an input, into one layer."""

    def __init__(self, target: LinearSlot) -> None:
        self.target = target
        self.parts: list[_Part] = []

    def try_fill(self) -> None:
        """Fills the merged layer and lets go of the members' weights."""
        weights = [part.weight for part in self.parts if part.weight is not None]
        if len(weights) < len(self.parts):
            return
        try:
            self.target.fill(torch.cat(weights))
        except EngineError as error:
            guilty = [
                part.name
                for part, weight in zip(self.parts, weights, strict=True)
                if not bool(torch.isfinite(weight).all())
            ]
            raise EngineError(f"{error} ({', '.join(guilty)})") from error
        for part in self.parts:
            part.weight = None

    def fill_bias(self) -> None:
        """Fills the bias with what has come so far."""
        self.target.fill_bias(
            torch.cat(
                [
                    torch.zeros(part.out_features) if part.bias is None else part.bias
                    for part in self.parts
                ]
            )
        )


def place_linears(
    model: nn.Module,
    weights: Weights,
    groups: Groups | None = None,
    maker: Maker | None = None,
    tuning: Tuning | None = None,
) -> dict[str, Placed]:
    """Swaps linear layers for empty ones of the wanted precision.

    Args:
        model: On the meta device; changed in place.
        weights: The precision. float32 and bfloat16 keep the model's own layers unless
            some are merged.
        groups: Layers to merge; the members disappear from the model.
        maker: Makes the layers; None makes those of the CPU.
        tuning: Which layers of the CPU get a corrected bias or a second plane.

    Returns:
        The slots by the names that the checkpoint knows.
    """
    make = maker or _maker(weights, groups, tuning or Tuning())
    if make is None:
        return {}
    placed: dict[str, Placed] = {}
    for name, members in (groups or {}).items():
        placed.update(_merge(model, name, members, make))
    for name in list(linear_names(model)):
        module = model.get_submodule(name)
        slot = make(name, *features(module))
        _assign(model, name, slot)
        placed[name] = Placed(slot, is_transposed(module), has_bias(module))
    return placed


def _maker(weights: Weights, groups: Groups | None, tuning: Tuning) -> Maker | None:
    """Returns what makes the CPU's layers, or None for the model's own."""
    if weights not in MAKERS or (weights == "float32" and not groups):
        return None
    if weights == "int8":
        return lambda name, in_features, out_features: Int8Linear(
            in_features,
            out_features,
            mean=tuning.mean(name),
            precise=tuning.is_sensitive(name),
        )
    make = MAKERS[weights]
    return lambda _name, in_features, out_features: make(in_features, out_features)


def _merge(
    model: nn.Module,
    name: str,
    members: tuple[str, ...],
    make: Maker,
) -> dict[str, Placed]:
    shapes = [features(model.get_submodule(member)) for member in members]
    biased = [has_bias(model.get_submodule(member)) for member in members]
    target = make(name, shapes[0][0], sum(rows for _, rows in shapes))
    whole = _Merged(target)
    whole.parts = [
        _Part(whole, member, *shape)
        for member, shape in zip(members, shapes, strict=True)
    ]
    for member in members:
        parent, _, child = member.rpartition(".")
        delattr(model.get_submodule(parent), child)
    _assign(model, name, target)
    return {
        member: Placed(part, transposed=False, bias=bias)
        for member, part, bias in zip(members, whole.parts, biased, strict=True)
    }


def _assign(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
