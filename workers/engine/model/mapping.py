"""Maps a safetensors file: its tensors are views of it, read when they are looked at.

safetensors' own way counts the whole file as memory to be promised, so that a system
refuses files larger than its memory, of which a few values or parts are wanted.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from ....shared.errors import ModelLoadError
from .headers import read_header

if TYPE_CHECKING:
    from .headers import StoredTensor

_TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's; the module names it from Python 3.13 on."""


def mapped_tensors(
    file: Path, *, sampled: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) by name; each is a view that keeps the file mapped.

    Args:
        file: Of safetensors.
        sampled: A few values of each are wanted: the system reads nothing ahead.

    Raises:
        ModelLoadError: It is missing, damaged, of an unknown type or cannot be mapped.
    """
    header = read_header(file)
    mapped = _map(file)
    if sampled:
        mapped.madvise(mmap.MADV_RANDOM)
    for name in sorted(header):
        yield name, _view(mapped, name, header[name])


def _map(file: Path) -> mmap.mmap:
    """Maps a file so that a write, if there is one, stays with this process."""
    flags = mmap.MAP_PRIVATE | (_NO_RESERVE if os.uname().sysname == "Linux" else 0)
    try:
        with file.open("rb") as stream:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(stream.fileno(), 0, flags=flags, prot=access)
    except OSError as error:
        cure = "fetch the checkpoint again"
        if error.errno == errno.ENOMEM:
            cure = (
                "the system promises no such addresses: raise `ulimit -v` or set "
                "vm.overcommit_memory=0, or split the file"
            )
        raise ModelLoadError(f"{file} cannot be mapped ({error}); {cure}") from error


def _view(mapped: mmap.mmap, name: str, stored: StoredTensor) -> torch.Tensor:
    dtype = _TYPES.get(stored.dtype)
    if dtype is None:
        raise ModelLoadError(
            f"{stored.file}: tensor {name} is of type {stored.dtype}; expected one of "
            f"{', '.join(_TYPES)}"
        )
    if not stored.size:
        return torch.empty(stored.shape, dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=dtype, count=stored.size, offset=stored.begin)
    return flat.reshape(stored.shape)
