"""The two files of an adapter: found, read within bounds, and what names them."""

from __future__ import annotations

import errno
import hashlib
import stat
from pathlib import Path
from typing import Final

from ....shared.errors import ModelLoadError

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_PICKLED: Final = "adapter_model.bin"
_MOST_CONFIG: Final = 4 << 20
"""Bytes of settings at most: a pattern for each layer of the largest models takes far
less."""


def digest_of(config: bytes, weights: bytes) -> str:
    """Returns the identity of an adapter's content.

    Args:
        config: Its settings, as they stand in the file.
        weights: Its weights.

    Returns:
        SHA-256 over both, 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, content in ((CONFIG_FILE, config), (WEIGHTS_FILE, weights)):
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def read_config_file(path: Path) -> bytes:
    """Returns an adapter's settings as they stand in their file.

    Args:
        path: The adapter's directory.

    Raises:
        ModelLoadError: The file is missing, no file, or far too large.
    """
    return _read(path, CONFIG_FILE, _MOST_CONFIG)


def read_weights_file(path: Path, most: int) -> bytes:
    """Returns an adapter's weights as they stand in their file.

    Args:
        path: The adapter's directory.
        most: Bytes that it may have.

    Raises:
        ModelLoadError: The file is missing, no file, or larger.
    """
    return _read(path, WEIGHTS_FILE, most)


def require_weights_file(path: Path) -> Path:
    """Returns the file of an adapter's weights, which is there and a file.

    Args:
        path: The adapter's directory.

    Raises:
        ModelLoadError: It is not.
    """
    try:
        _regular_size(path / WEIGHTS_FILE)
    except OSError as error:
        raise _unreadable(path, WEIGHTS_FILE, error) from error
    return path / WEIGHTS_FILE


def _read(path: Path, name: str, most: int) -> bytes:
    file = path / name
    try:
        size = _regular_size(file)
        with file.open("rb") as stream:
            content = stream.read(min(size, most) + 1)
    except OSError as error:
        raise _unreadable(path, name, error) from error
    if len(content) > most:
        raise ModelLoadError(
            f"{file} has more than the {most} bytes that its content takes; save the "
            "adapter again"
        )
    return content


def _regular_size(file: Path) -> int:
    """Of files alone: a pipe would keep its reader for ever."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return found.st_size


def _unreadable(path: Path, name: str, error: OSError) -> ModelLoadError:
    hint = "expected the directory that peft's save_pretrained wrote"
    if name == WEIGHTS_FILE and (path / _PICKLED).is_file():
        hint = f"{_PICKLED} is a pickle, which is never read: save it as safetensors"
    return ModelLoadError(f"{path / name} cannot be read ({error}); {hint}")
