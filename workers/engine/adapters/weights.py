"""Reads an adapter's weights, all of them checked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ....shared.errors import ModelLoadError
from .checkpoint import WEIGHTS_FILE, AdapterFacts, make_facts, unreadable
from .config import CONFIG_FILE, MAX_RANK, read_adapter_config
from .targets import BaseLinears, match_targets


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What one linear layer gains: y += scale * (x @ a.T) @ b.T."""

    a: torch.Tensor
    """float32 [rank, in_features]."""
    b: torch.Tensor
    """float32 [out_features, rank]."""
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter in memory, as it was saved."""

    facts: AdapterFacts
    pairs: Mapping[str, LoraPair]
    """By the layers' dotted names in the base model."""


def read_adapter(
    path: Path, base: BaseLinears, *, max_rank: int = MAX_RANK
) -> AdapterWeights:
    """Reads an adapter and checks everything about it.

    The files are read once, so that the digest is that of the very values returned.

    Args:
        path: The adapter's directory.
        base: The layers that it may change.
        max_rank: Largest rank allowed.

    Raises:
        ModelLoadError: It is damaged, of a kind that is not served, of another base,
            or a value is NaN or infinite; the message names the tensor or the setting.
    """
    config = read_adapter_config(path)
    size, digest, tensors = _read(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    targets = match_targets(config, shapes, base, max_rank)
    pairs = {
        target.module: LoraPair(
            a=_checked(path, target.a, tensors.pop(target.a)),
            b=_checked(path, target.b, tensors.pop(target.b)),
            scale=target.scale,
        )
        for target in targets
    }
    facts = make_facts(config, targets, size=size, digest=digest)
    return AdapterWeights(facts, pairs)


def _read(path: Path) -> tuple[int, str, dict[str, torch.Tensor]]:
    """Returns bytes of the weights, the digest of `adapter_digest`, and the tensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    digest = hashlib.sha256()
    content = b""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise unreadable(path, name, error) from error
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    try:
        return len(content), digest.hexdigest(), load(content)
    except SafetensorError as error:
        raise ModelLoadError(
            f"{path / WEIGHTS_FILE} is damaged ({error}); save the adapter again"
        ) from error


def _checked(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        raise ModelLoadError(
            f"{path / WEIGHTS_FILE}: tensor {name} is of type {tensor.dtype}; expected "
            "floats"
        )
    values = tensor.float()
    if not bool(torch.isfinite(values).all()):
        raise ModelLoadError(
            f"{path / WEIGHTS_FILE}: tensor {name} has NaN or infinity; the adapter is "
            "damaged or its training diverged"
        )
    return values
