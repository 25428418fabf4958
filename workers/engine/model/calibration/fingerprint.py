"""Names a checkpoint by its weights alone, however its files are laid out."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import torch

from ..checkpoint import iterate

_SAMPLES: Final = 16
"""Values looked at per tensor: enough to tell two trainings apart."""


def weights_fingerprint(path: Path) -> str:
    """Returns a name for a checkpoint's weights.

    It covers every tensor's name, shape and some of its values as float32, so files
    that are split otherwise, or stored in a wider type, have the same name.

    Args:
        path: A checkpoint directory.

    Raises:
        ModelLoadError: The files are missing or damaged.
    """
    lines = []
    for name, tensor in iterate(path, sampled=True):
        flat = tensor.reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        values = flat[::step][:_SAMPLES].to(torch.float32).tolist()
        lines.append(f"{name} {list(tensor.shape)} {values}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
