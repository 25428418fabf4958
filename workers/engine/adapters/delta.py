"""What an adapter adds to one linear layer's output, computed row by row.

`y += (x @ a.T) @ b.T`, with the adapter's scale in b. A row's result depends on that
row alone, so that a request's tokens do not depend on what shares its steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import nn

from ..kernels import ops
from ..model.quantize import ACTIVATIONS, rounding_residual

if TYPE_CHECKING:
    from ..kernels.layout import PackedWeight
    from ..model.device import Target

ROWS_AT_ONCE: Final = 64
"""Rows of each matrix product on a GPU, whose library chooses another order of summing
for another number of rows."""


class Delta(Protocol):
    """An adapted layer's own part."""

    nbytes: int
    """Memory that it takes."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [rows, in_features] into [rows, out_features]."""
        ...


class KernelDelta:
    """By the CPU's INT8 kernels, whose rows do not see each other.

    Each weight is kept in two INT8 planes, the second being what rounding leaves of the
    first: about 15 bits, in half the memory of float32.

    Args:
        a: float32 [rank, in_features].
        b: float32 [out_features, rank], scale included.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self._a = _two_planes(a)
        self._b = _two_planes(b)
        self.nbytes = self._a.nbytes + self._b.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies float32 [rows, in_features] into [rows, out_features]."""
        return _multiply(_multiply(x, self._a), self._b)


def _two_planes(weight: torch.Tensor) -> PackedWeight:
    """Packs both planes as one weight of twice the rows: one call instead of two."""
    both = torch.cat((weight, rounding_residual(weight)))
    return ops.quantize_weight(both, activations=ACTIVATIONS)


def _multiply(x: torch.Tensor, planes: PackedWeight) -> torch.Tensor:
    first, rest = ops.linear(x, planes).chunk(2, dim=-1)
    return first + rest


class TorchDelta:
    """By torch, in the type of the layer's activations.

    Args:
        a: float32 [rank, in_features].
        b: float32 [out_features, rank], scale included.
        target: Where it is computed, and in which type.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, target: Target) -> None:
        self._a = a.to(target.device, target.dtype).contiguous()
        self._b = b.to(target.device, target.dtype).contiguous()
        self._in_tiles = target.is_accelerator
        self.nbytes = self._a.nbytes + self._b.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [rows, in_features] into [rows, out_features]."""
        x = x.to(self._a.dtype)
        if not self._in_tiles:
            return self._multiply(x)
        rows = len(x)
        padded = nn.functional.pad(x, (0, 0, 0, -rows % ROWS_AT_ONCE))
        parts = [self._multiply(tile) for tile in torch.split(padded, ROWS_AT_ONCE)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.linear(x, self._a)
        return nn.functional.linear(inner, self._b)
