"""An adapter's directory as far as it can be read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ....shared.errors import ModelLoadError
from ..model.headers import FLOAT_BYTES, StoredTensor, read_header
from .config import AdapterConfig, parse_config
from .files import (
    digest_of,
    read_config_file,
    read_weights_file,
    require_weights_file,
)

if TYPE_CHECKING:
    from .targets import Target

_MOST_HEADER = 100_000_000
"""Bytes of a header of safetensors at most, by its specification."""


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
    notes: tuple[str, ...] = ()
    """What may be wrong with it and cannot be told from its files."""


class AdapterFiles(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter's settings, and the header of its weights."""

    path: Path
    config: AdapterConfig
    raw_config: bytes
    stored: Mapping[str, StoredTensor]
    """By the names of its tensors."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of its tensors."""
        return {name: tensor.shape for name, tensor in self.stored.items()}

    def weights(self) -> bytes:
        """Returns the whole file of its weights; check the header first.

        Raises:
            ModelLoadError: It cannot be read, or has more than its header says.
        """
        values = sum(one.size * FLOAT_BYTES[one.dtype] for one in self.stored.values())
        return read_weights_file(self.path, 8 + _MOST_HEADER + values)

    def digest(self, weights: bytes) -> str:
        """Returns the identity of settings and weights together."""
        return digest_of(self.raw_config, weights)


def open_adapter(path: Path) -> AdapterFiles:
    """Reads and checks an adapter's settings, and the header of its weights.

    Args:
        path: The adapter's directory.

    Raises:
        ModelLoadError: A file is missing or damaged, it is of a kind that is not
            served, or a tensor is no float.
    """
    raw = read_config_file(path)
    config = parse_config(path, raw)
    file = require_weights_file(path)
    stored = read_header(file)
    for name, tensor in stored.items():
        if tensor.dtype not in FLOAT_BYTES:
            raise ModelLoadError(
                f"{file}: tensor {name} is of type {tensor.dtype}; expected one of "
                f"{', '.join(FLOAT_BYTES)}"
            )
    return AdapterFiles(path=path, config=config, raw_config=raw, stored=stored)


def adapter_digest(path: Path) -> str:
    """Returns the identity of an adapter's content: 64 hexadecimal digits.

    Args:
        path: The adapter's directory.

    Raises:
        ModelLoadError: It cannot be read.
    """
    files = open_adapter(path)
    return files.digest(files.weights())


def make_facts(
    config: AdapterConfig,
    targets: tuple[Target, ...],
    *,
    origin: str,
    size: int,
    digest: str,
) -> AdapterFacts:
    """Returns the facts of an adapter that was checked.

    Args:
        config: Its settings.
        targets: Its layers.
        origin: Directory of the base that it was checked against.
        size: Bytes of its weights on disk.
        digest: Of its content.
    """
    return AdapterFacts(
        rank=max(target.rank for target in targets),
        alpha=config.alpha,
        targets=tuple(sorted({one.module.rpartition(".")[2] for one in targets})),
        bytes=size,
        digest=digest,
        base=config.base,
        notes=(*config.selection.notes, *of_another_base(config.base, origin)),
    )


def of_another_base(named: str, origin: str) -> list[str]:
    """Returns a warning where a base has another name than the one of the training.

    Shapes alone cannot tell, and names are no proof: paths move, copies are renamed.

    Args:
        named: What the adapter was trained on, as its trainer named it.
        origin: Directory of the base here.
    """
    own = {Path(origin).name, str(_settings_of(origin).get("_name_or_path") or "")}
    for part in Path(origin).parts:  # a hub's cache: models--owner--name/snapshots/…
        if part.startswith("models--"):
            own.add(part.rpartition("--")[2])
    names = {Path(one).name.lower() for one in own}
    if not named or Path(named).name.lower() in names:
        return []
    note = (
        f"its settings say that it was trained on {named!r}, the base here is "
        f"{origin}; make sure that these are the same weights"
    )
    return [note]


def _settings_of(origin: str) -> dict[str, object]:
    try:
        content = json.loads((Path(origin) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
