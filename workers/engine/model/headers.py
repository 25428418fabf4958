"""What a checkpoint's safetensors headers say: every tensor's file, shape and type.

Only headers are read, so a damaged or foreign checkpoint is refused in milliseconds,
before seconds of imports and minutes of weights, with the file and tensor at fault.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from ....shared.errors import ModelLoadError

FLOAT_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types that weights may be stored in, with the bytes of one value."""
NOT_WEIGHTS: Final = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names in old checkpoints of what the code computes by itself."""
INDEX: Final = "model.safetensors.index.json"
"""Says which file has which tensor."""
_BYTES: Final = {
    **FLOAT_BYTES,
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
    "I16": 2,
    "I32": 4,
    "I64": 8,
}
_OURS: Final = "tokenmill-"
_METADATA: Final = "__metadata__"
_NAMED_IN_MESSAGE: Final = 5
_NUMBERED: Final = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it, for example "BF16"."""
    begin: int = 0
    """Its first byte in the file."""

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


def shard_files(directory: Path) -> list[Path]:
    """Returns a checkpoint's safetensors files, those of its index if it has one.

    Raises:
        ModelLoadError: There are none, or the index names one that is missing.
    """
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} is not a weight index: {error}") from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{directory} lacks {', '.join(missing[:_NAMED_IN_MESSAGE])} which its "
                "index names; fetch the checkpoint again"
            )
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else _unnamed(directory)
    if not files:
        raise ModelLoadError(f"{directory} has no *.safetensors files")
    _check_numbers(directory, files)
    return files


def _unnamed(directory: Path) -> list[Path]:
    """Returns all safetensors files but those that tokenmill itself puts there."""
    files = sorted(directory.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith(_OURS)]


def _check_numbers(directory: Path, files: list[Path]) -> None:
    """Refuses part of a checkpoint whose files are numbered but have no index."""
    found = [match for file in files if (match := _NUMBERED.search(file.name))]
    numbers = {int(match[1]) for match in found}
    expected = max((int(match[2]) for match in found), default=0)
    missing = sorted(set(range(1, expected + 1)) - numbers)
    if missing:
        shown = ", ".join(map(str, missing[:_NAMED_IN_MESSAGE]))
        raise ModelLoadError(
            f"{directory} lacks file {shown} of the {expected} that hold its weights; "
            "fetch the checkpoint again"
        )


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Reads and checks the headers of all files of a checkpoint.

    Args:
        directory: With *.safetensors.

    Returns:
        Every tensor by its name.

    Raises:
        ModelLoadError: A file is missing, cut short or no safetensors, a tensor comes
            twice or is not of a float type, or the index and the files disagree.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in shard_files(directory):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise ModelLoadError(
                    f"tensor {name} is in {tensors[name].file} and again in {file}; "
                    "expected each once: remove files of another checkpoint"
                )
            _check_type(name, tensor)
            tensors[name] = tensor
    _check_index(directory, tensors)
    return tensors


def _check_type(name: str, tensor: StoredTensor) -> None:
    """Refuses integers and floats of eight bits: the scales would be ignored."""
    if tensor.dtype not in FLOAT_BYTES and not name.endswith(NOT_WEIGHTS):
        raise ModelLoadError(
            f"{tensor.file}: tensor {name} is of type {tensor.dtype}; expected one of "
            f"{', '.join(FLOAT_BYTES)}: give the float checkpoint, weights are "
            "quantized at load"
        )


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Reads the header of one file; types are not checked.

    Args:
        file: Of safetensors.

    Raises:
        ModelLoadError: It is missing, cut short or no safetensors.
    """
    try:
        return _parse(file)
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
        struct.error,
    ) as error:
        raise ModelLoadError(
            f"{file} is not a whole safetensors file ({error}); fetch the "
            "checkpoint again"
        ) from error


def _parse(file: Path) -> dict[str, StoredTensor]:
    """Reads one file's header; raises whatever is wrong with it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > size - 8:
            raise ValueError(f"its header is {length} bytes long, the file {size}")
        header = json.loads(stream.read(length), object_pairs_hook=_no_name_twice)
    entries = {name: entry for name, entry in header.items() if name != _METADATA}
    found: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        first, last = map(int, entry["data_offsets"])
        if not 0 <= first <= last:
            raise ValueError(f"tensor {name} is from byte {first} to {last}")
        if 8 + length + last > size:
            raise ValueError(
                f"it is cut short in tensor {name}: {size} of {8 + length + last} bytes"
            )
        shape = tuple(map(int, entry["shape"]))
        begin = 8 + length + first
        tensor = StoredTensor(file, shape, str(entry["dtype"]), begin)
        expected = tensor.size * _BYTES.get(tensor.dtype, 0)
        if expected and last - first != expected:
            raise ValueError(
                f"tensor {name} has {last - first} bytes, its shape {list(shape)} of "
                f"{tensor.dtype} takes {expected}"
            )
        found[name] = tensor
    return found


def _no_name_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = [name for name, count in counts.items() if count > 1]
        raise ValueError(f"its header names {', '.join(twice)} twice")
    return content


def _check_index(directory: Path, tensors: dict[str, StoredTensor]) -> None:
    """Refuses an index that puts a tensor where it is not."""
    index = directory / INDEX
    if not index.is_file():
        return
    for name, file in json.loads(index.read_bytes())["weight_map"].items():
        held = tensors.get(name)
        if held is None or held.file.name != file:
            where = f"it is in {held.file.name}" if held else "no file has it"
            raise ModelLoadError(
                f"{index} says that {file} has tensor {name}, but {where}; fetch the "
                "checkpoint again"
            )
