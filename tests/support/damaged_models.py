"""Changes files of a tiny checkpoint, so that something in it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    import torch

UP = "model.layers.1.mlp.up_proj.weight"
"""A tensor of the tiny llama."""
WEIGHTS = "model.safetensors"


def edit_config(path: Path, **changes: object) -> None:
    """Changes keys of config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Puts other tensors in the place of some; None leaves one out."""
    tensors = {**load_file(path / WEIGHTS), **changes}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, path / WEIGHTS)
