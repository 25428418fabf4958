"""The tensors that a model keeps, in whatever form: what its memory is counted from."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


def tensors_of(owner: object) -> Iterator[torch.Tensor]:
    """Yields the tensors that something keeps, in whatever form it keeps them."""
    if isinstance(owner, torch.Tensor):
        yield owner
        # bitsandbytes keeps the scales of a 4-bit weight beside it.
        if (state := getattr(owner, "quant_state", None)) is not None:
            yield from tensors_of(vars(state))
    elif isinstance(owner, dict):
        for value in owner.values():
            yield from tensors_of(value)
    elif isinstance(owner, list | tuple):
        for value in owner:
            yield from tensors_of(value)
    elif dataclasses.is_dataclass(owner):
        for field in dataclasses.fields(owner):
            yield from tensors_of(getattr(owner, field.name))
    elif type(owner).__name__ == "QuantState":
        yield from tensors_of(vars(owner))


def own_tensors(module: "nn.Module") -> Iterator[torch.Tensor]:
    """Yields the tensors of a module without those of the modules in it."""
    yield from tensors_of({k: v for k, v in vars(module).items() if k != "_modules"})
