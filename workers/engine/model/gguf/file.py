"""A GGUF file's metadata and tensors, read with errors that name file and key."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .....shared.errors import ModelLoadError

if TYPE_CHECKING:
    from gguf import ReaderTensor


class GgufFile:
    """One whole GGUF file.

    Args:
        path: The file.

    Raises:
        ModelLoadError: Not readable as GGUF, or one part of several.
    """

    def __init__(self, path: Path) -> None:
        from .reader import CheckedReader, DamagedTensor

        self.path = path
        try:
            self._reader = CheckedReader(path)
        except DamagedTensor as error:
            raise ModelLoadError(
                f"{path} is not a readable GGUF file: {error}; it is damaged or cut "
                "short, fetch it again"
            ) from error
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            ArithmeticError,
            AttributeError,
        ) as error:
            # What the library says is of its own arrays, which tells a user nothing.
            raise ModelLoadError(
                f"{path} is not a readable GGUF file: {_what_is_wrong(path)}; it is "
                "damaged or cut short, fetch it again"
            ) from error
        parts = self.integer("split.count", 1)
        if parts > 1:
            raise ModelLoadError(
                f"{path} is one of {parts} parts; merge them into one file first "
                "(llama.cpp's gguf-split does)"
            )

    @property
    def stored(self) -> "Sequence[ReaderTensor]":
        """The tensors as they are stored, in file order."""
        tensors: Sequence[ReaderTensor] = self._reader.tensors
        return tensors

    def has(self, name: str) -> bool:
        """Returns whether there is metadata of that GGUF key."""
        return self._reader.get_field(name) is not None

    def field(self, name: str) -> object:
        """Returns a metadata value by its GGUF key; ModelLoadError if it lacks."""
        found = self._reader.get_field(name)
        if found is None:
            raise ModelLoadError(f"{self.path} lacks the metadata key {name!r}")
        try:
            value: object = found.contents()
        except (ValueError, LookupError, TypeError) as error:
            raise ModelLoadError(
                f"{self.path}: metadata {name!r} is damaged: {error}; fetch it again"
            ) from error
        return value

    def integer(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        """Returns an integer metadata value.

        Args:
            name: Its GGUF key.
            default: Where the key lacks; None raises.
            least: Smallest value that makes sense.
        """
        if default is not None and not self.has(name):
            return default
        value = self.field(name)
        if not isinstance(value, int) or value < least:
            raise ModelLoadError(
                f"{self.path}: metadata {name!r} is {value!r}, expected an integer "
                f"from {least}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a float metadata value, or the default where the key lacks."""
        if default is not None and not self.has(name):
            return default
        value = self.field(name)
        if not isinstance(value, (int, float)):
            raise ModelLoadError(
                f"{self.path}: metadata {name!r} is {value!r}, expected a number"
            )
        # GGUF stores float32; its shortest decimal form is what the author wrote.
        return float(str(np.float32(value)))

    def strings(self, name: str) -> list[str]:
        """Returns a metadata array of strings."""
        value = self.field(name)
        if not isinstance(value, list):
            raise ModelLoadError(
                f"{self.path}: metadata {name!r} is no array of strings"
            )
        return [str(item) for item in value]

    def values(self, tensor: "ReaderTensor") -> np.ndarray:
        """Returns a tensor as float32, whatever it is stored in."""
        from gguf.quants import dequantize

        try:
            # Damaged scales make numbers that are not finite; layers refuse those.
            with np.errstate(all="ignore"):
                values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ModelLoadError(
                f"{self.path}: tensor {tensor.name} of type "
                f"{tensor.tensor_type.name} cannot be read: {error}"
            ) from error
        return np.ascontiguousarray(values, dtype=np.float32)


def _what_is_wrong(path: Path) -> str:
    """Tells why a file's header cannot be read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            beginning = stream.read(8)
    except OSError as error:
        return str(error)
    if beginning[:4] != b"GGUF":
        return "it does not begin with 'GGUF'"
    version = int.from_bytes(beginning[4:], "little")
    if version not in (2, 3):
        return f"it is of version {version}, expected 2 or 3"
    return f"its {size} bytes hold no whole header"


def shape_of(tensor: "ReaderTensor") -> tuple[int, ...]:
    """Returns a tensor's shape, outermost first; GGUF counts from the innermost."""
    return tuple(int(size) for size in reversed(tensor.shape))
