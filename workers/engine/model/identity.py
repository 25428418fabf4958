"""What a checkpoint says about itself: its end tokens and which weights it holds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ....shared.errors import ModelLoadError
from .headers import shard_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SAMPLE_BYTES = 1 << 20


def eos_token_ids(path: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Returns the ids that end an output, as `generate` would take them.

    Args:
        path: Its generation_config.json goes before the model's configuration.
        config: The model's configuration.
    """
    file = path / "generation_config.json"
    found: object = None
    if file.is_file():
        try:
            found = json.loads(file.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if found is None:
        found = config.eos_token_id
    if found is None:
        return frozenset()
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(item, int) for item in ids):
        raise ModelLoadError(f"{path}: eos_token_id is {found!r}, expected token ids")
    return frozenset(ids)


def weights_version(path: Path, weights: str, kv: str) -> str:
    """Returns a short name for these weights in this precision.

    Jobs that were cut off resume only on the same version. It covers the configuration,
    every tensor's name, shape and place, and samples of the data.

    Args:
        path: The checkpoint.
        weights: Precision of linear layers.
        kv: Precision of the KV pool.
    """
    digest = hashlib.sha256(f"{weights}/{kv}/".encode())
    digest.update((path / "config.json").read_bytes())
    for file in shard_files(path):
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as stream:
            for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
