"""Merges an adapter into its base for good: a checkpoint goes in, another comes out.

Tensor by tensor: a file's header is taken over as it stands, since names, shapes and
types stay, and only the weights that the adapter changes are computed anew.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import torch

from ....shared.errors import ModelLoadError
from ..model.families import family_of
from ..model.headers import read_headers, shard_files
from .targets import is_transposed, linear_weights

if TYPE_CHECKING:
    from .weights import AdapterWeights, LoraPair

Progress = Callable[[str, float], None]
_WEIGHTS: Final = frozenset(
    (
        ".bin",
        ".ckpt",
        ".gguf",
        ".h5",
        ".msgpack",
        ".onnx",
        ".pt",
        ".pth",
        ".safetensors",
    )
)
"""Ends of files that hold weights, of the base therefore."""
_OURS: Final = "tokenmill-"
"""Begins what tokenmill has put beside a checkpoint: true of the base alone."""
_COPIED_AT_ONCE: Final = 1 << 22
_SPARE_BYTES: Final = 64 << 20


@dataclass(slots=True)
class Rounding:
    """What the checkpoint's type leaves of the adapter; squared sums of weights."""

    wanted: float = 0.0
    lost: float = 0.0

    @property
    def share(self) -> float:
        """Part of the adapter, by its norm, that rounding has lost."""
        return math.sqrt(self.lost / self.wanted) if self.wanted else 0.0


@contextmanager
def fresh_directory(target: Path) -> Iterator[Path]:
    """Gives a directory that becomes `target` once all in it is done, or goes away.

    Args:
        target: Must not exist; its parent must.

    Yields:
        A directory beside it.

    Raises:
        ModelLoadError: There is something already, or nowhere to write.
    """
    if target.exists():
        raise ModelLoadError(f"{target} exists already; give a new directory")
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ModelLoadError(f"{target} cannot be made: {error}") from error
    try:
        partial.chmod(0o755)  # made private by mkdtemp; workers may be another user
        yield partial
        for file in partial.iterdir():
            _to_disk(file)
        partial.rename(target)
        _to_disk(target.parent)
    except OSError as error:
        raise ModelLoadError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(
            partial, ignore_errors=True
        )  # it has another name by now, or ends


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_merged(
    base: Path, weights: AdapterWeights, target: Path, progress: Progress
) -> Rounding:
    """Writes a base with an adapter in it.

    Args:
        base: The base's directory.
        weights: The adapter, checked against it.
        target: An empty directory.
        progress: Told the fraction of files that are written.

    Returns:
        What rounding to the checkpoint's type has cost.

    Raises:
        ModelLoadError: A merged weight is not finite, or the disk is too small.
    """
    family = family_of(base)
    stored = read_headers(base)
    changes = {
        tensor: weights.pairs[module]
        for tensor, module in linear_weights(family, stored).items()
        if module in weights.pairs
    }
    files = shard_files(base)
    _check_room(files, target)
    merger = _Merger(changes, transposed=is_transposed(family))
    for index, file in enumerate(files):
        merger.merge(file, target / file.name)
        progress("merging", (index + 1) / len(files))
    for file in base.iterdir():
        other = file.suffix not in _WEIGHTS and not file.name.startswith((_OURS, "."))
        if other and file.is_file():
            shutil.copyfile(file, target / file.name)
    return merger.rounding


def _check_room(files: list[Path], target: Path) -> None:
    needed = sum(file.stat().st_size for file in files) + _SPARE_BYTES
    free = shutil.disk_usage(target).free
    if free < needed:
        raise ModelLoadError(
            f"the merged model takes {needed >> 20} MiB and {target.parent} has "
            f"{free >> 20} MiB free; give an output on a larger disk"
        )


class _Merger:
    """Copies files of a checkpoint, with some of the weights changed.

    Args:
        changes: By tensor.
        transposed: Weights are kept as [in, out].
    """

    def __init__(self, changes: Mapping[str, LoraPair], *, transposed: bool) -> None:
        self._changes = changes
        self._transposed = transposed
        self.rounding = Rounding()

    def merge(self, source: Path, target: Path) -> None:
        """Writes one file."""
        from safetensors import safe_open

        with (
            source.open("rb") as old,
            target.open("wb") as new,
            safe_open(source, framework="pt", device="cpu") as tensors,
        ):
            start = old.read(8)
            header = old.read(struct.unpack("<Q", start)[0])
            new.write(start + header)
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            for name in sorted(entries, key=lambda n: entries[n]["data_offsets"]):
                first, last = entries[name]["data_offsets"]
                old.seek(8 + len(header) + first)
                if name in self._changes:
                    merged = self._merged(source, name, tensors.get_tensor(name))
                    new.write(merged.view(torch.uint8).numpy().data)
                else:
                    _copy(old, new, last - first)

    def _merged(self, file: Path, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Returns a weight with its part of the adapter, in its own type."""
        pair = self._changes[name]
        wide = torch.promote_types(weight.dtype, torch.float32)
        change = (pair.b.to(wide) * pair.scale) @ pair.a.to(wide)
        if self._transposed:
            change = change.T
        self.rounding.wanted += float(change.double().square().sum())
        exact = weight.to(wide) + change
        merged = exact.to(weight.dtype).contiguous()
        if not bool(torch.isfinite(merged).all()):
            raise ModelLoadError(
                f"{file}: weight {name} would not be finite in {weight.dtype} with the "
                "adapter in it; serve the adapter unmerged"
            )
        self.rounding.lost += float((merged.to(wide) - exact).double().square().sum())
        return merged


def _copy(old: BinaryIO, new: BinaryIO, size: int) -> None:
    while size:
        part = old.read(min(size, _COPIED_AT_ONCE))
        new.write(part)
        size -= len(part)
