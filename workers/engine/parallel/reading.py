"""Reads a rank's parts of tensors from safetensors, and nothing beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from ....shared.errors import ModelLoadError
from ..model.headers import shard_files
from .shard import Range


class _Stored(Protocol):
    """A tensor in a file, of which parts can be read."""

    def __getitem__(self, part: slice | tuple[slice, slice]) -> torch.Tensor:
        """Returns a part, perhaps as a view of the mapped file."""
        ...


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
    from safetensors import SafetensorError, safe_open

    for file in shard_files(directory):
        try:
            with safe_open(file, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118  (not a mapping)
                    if name in wanted:
                        yield name, _read(shard.get_slice(name), wanted[name])
        except (SafetensorError, IndexError) as error:
            raise ModelLoadError(
                f"{file} is damaged ({error}); fetch the checkpoint again"
            ) from error


def _read(stored: _Stored, cut: TensorCut | None) -> torch.Tensor:
    """Returns a part in memory of its own, which keeps no file mapped."""
    if cut is None:
        return stored[:].clone()
    parts = [
        stored[start:stop] if cut.dim == 0 else stored[:, start:stop]
        for start, stop in cut.ranges
    ]
    return parts[0].clone() if len(parts) == 1 else torch.cat(parts, dim=cut.dim)
