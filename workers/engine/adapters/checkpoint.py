"""An adapter's directory: its identity, and whether it fits a base, without torch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from ....shared.errors import ModelLoadError
from ..model.headers import FLOAT_BYTES, StoredTensor, read_header
from .config import CONFIG_FILE, MAX_RANK, AdapterConfig, read_adapter_config
from .targets import Target, base_linears, match_targets

WEIGHTS_FILE: Final = "adapter_model.safetensors"
_PICKLED: Final = "adapter_model.bin"
_READ_AT_ONCE: Final = 1 << 20


class AdapterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What registration keeps of an adapter."""

    rank: int
    """Largest of its layers'."""
    alpha: float
    targets: tuple[str, ...]
    """Last parts of its layers' names, sorted."""
    bytes: int
    """Size of its weights on disk."""
    digest: str
    """Of its settings and weights: 64 hexadecimal digits."""
    base: str
    """What it was trained on, as its trainer named it."""


def adapter_digest(path: Path) -> str:
    """Returns the identity of an adapter's content.

    Args:
        path: The adapter's directory.

    Returns:
        SHA-256 over settings and weights, 64 hexadecimal digits.

    Raises:
        ModelLoadError: A file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        file = path / name
        try:
            digest.update(f"{name} {file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                while part := stream.read(_READ_AT_ONCE):
                    digest.update(part)
        except OSError as error:
            raise unreadable(path, name, error) from error
    return digest.hexdigest()


def unreadable(path: Path, name: str, error: OSError) -> ModelLoadError:
    """Returns what to say of a file that cannot be read.

    Args:
        path: The adapter's directory.
        name: The file in it.
        error: Why.
    """
    hint = "expected the directory that peft's save_pretrained wrote"
    if name == WEIGHTS_FILE and (path / _PICKLED).is_file():
        hint = f"{_PICKLED} is a pickle, which is never read: save it as safetensors"
    return ModelLoadError(f"{path / name} cannot be read ({error}); {hint}")


def check_adapter(
    path: Path, base_path: Path, *, max_rank: int = MAX_RANK
) -> AdapterFacts:
    """Checks settings, names and shapes of an adapter against a base checkpoint.

    Values are not looked at; `weights.read_adapter` does that.

    Args:
        path: The adapter's directory.
        base_path: The base model's.
        max_rank: Largest rank allowed.

    Raises:
        ModelLoadError: It is damaged, of a kind that is not served, or of another
            base; the message names the tensor or the setting.
    """
    config = read_adapter_config(path)
    stored = read_weights_header(path)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    targets = match_targets(config, shapes, base_linears(base_path), max_rank)
    size = (path / WEIGHTS_FILE).stat().st_size
    return make_facts(config, targets, size=size, digest=adapter_digest(path))


def read_weights_header(path: Path) -> dict[str, StoredTensor]:
    """Reads what tensors an adapter has.

    Args:
        path: The adapter's directory.

    Raises:
        ModelLoadError: The file is missing or damaged, or a tensor is no float.
    """
    file = path / WEIGHTS_FILE
    try:
        file.stat()
    except OSError as error:
        raise unreadable(path, WEIGHTS_FILE, error) from error
    stored = read_header(file)
    for name, tensor in stored.items():
        if tensor.dtype not in FLOAT_BYTES:
            raise ModelLoadError(
                f"{file}: tensor {name} is of type {tensor.dtype}; expected one of "
                f"{', '.join(FLOAT_BYTES)}"
            )
    return stored


def make_facts(
    config: AdapterConfig, targets: tuple[Target, ...], *, size: int, digest: str
) -> AdapterFacts:
    """Returns the facts of an adapter that was checked.

    Args:
        config: Its settings.
        targets: Its layers.
        size: Bytes of its weights on disk.
        digest: From `adapter_digest`.
    """
    return AdapterFacts(
        rank=max(target.rank for target in targets),
        alpha=config.alpha,
        targets=tuple(sorted({one.module.rpartition(".")[2] for one in targets})),
        bytes=size,
        digest=digest,
        base=config.base,
    )
