"""The GGUF library's reader, with a look at where each tensor lies first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

if TYPE_CHECKING:
    from gguf import ReaderField


class DamagedTensor(ValueError):
    """A tensor that the file does not hold as its header says."""


class CheckedReader(GGUFReader):  # type: ignore[misc]
    """Names the tensor that a file does not hold, and the sizes.

    The library slices what is there and fails in numpy where that is too little.
    """

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        size = len(self.data)
        for field in fields:
            _length, name, _count, sizes, kind, offset = field.parts
            label = str(bytes(name), encoding="utf-8", errors="replace")
            shape = [int(number) for number in sizes]
            if int(kind[0]) not in set(GGMLQuantizationType):
                raise DamagedTensor(f"tensor {label} is of unknown type {int(kind[0])}")
            block, width = GGML_QUANT_SIZES[GGMLQuantizationType(int(kind[0]))]
            if shape and shape[0] % block:
                raise DamagedTensor(
                    f"tensor {label} has rows of {shape[0]} numbers, but its type "
                    f"packs them by {block}"
                )
            end = start_offs + int(offset[0]) + math.prod(shape) * width // block
            if end > size:
                raise DamagedTensor(
                    f"tensor {label} ends at byte {end}, but the file has {size}"
                )
        super()._build_tensors(start_offs, fields)
