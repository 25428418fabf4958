"""Reads a rank's parts of tensors from safetensors, and nothing beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch

from ....shared.errors import ModelLoadError
from ..model.headers import shard_files
from ..model.mapping import mapped_tensors
from .shard import Range


class TensorCut(msgspec.Struct, frozen=True):
    """A rank's part of one stored tensor."""

    dim: int
    """Of the tensor as it is stored, 0 or 1."""
    ranges: tuple[Range, ...]
    """Put together in this order."""


def iterate_parts(
    directory: Path, wanted: Mapping[str, TensorCut | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, part) over all files; a part is read when it is yielded.

    Args:
        directory: The checkpoint.
        wanted: By stored name; None is the whole tensor. Others are not read.

    Raises:
        ModelLoadError: A file is damaged, or a tensor is smaller than its part.
    """
    for file in shard_files(directory):
        for name, tensor in mapped_tensors(file):
            if name in wanted:
                yield name, read_part(tensor, wanted[name], f"{file}: tensor {name}")


def read_part(stored: torch.Tensor, cut: TensorCut | None, which: str) -> torch.Tensor:
    """Returns a part in memory of its own, which keeps no file mapped.

    Args:
        stored: The whole tensor, or a view of it in a file.
        cut: Which part; None is all of it.
        which: Names the tensor in messages.

    Raises:
        ModelLoadError: It is smaller than the part.
    """
    if cut is None:
        return stored.clone()
    there = stored.shape[cut.dim] if cut.dim < stored.dim() else 0
    last = max(stop for _, stop in cut.ranges)
    if last > there:
        raise ModelLoadError(
            f"{which} has {there} rows or columns where {last} are wanted; fetch the "
            "checkpoint again"
        )
    parts = [stored.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges]
    return parts[0].clone() if len(parts) == 1 else torch.cat(parts, dim=cut.dim)
