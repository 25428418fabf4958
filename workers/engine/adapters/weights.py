"""Reads an adapter's weights, all of them checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from ....shared.errors import ModelLoadError
from ..parallel.reading import TensorCut, read_part
from .checkpoint import AdapterFacts, make_facts, open_adapter
from .config import MAX_RANK
from .files import WEIGHTS_FILE
from .targets import BaseLinears, match_targets

if TYPE_CHECKING:
    from ..parallel.cuts import LayerCut


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
    path: Path,
    base: BaseLinears,
    *,
    max_rank: int | None = MAX_RANK,
    cuts: Mapping[str, LayerCut] | None = None,
) -> AdapterWeights:
    """Reads an adapter and checks everything about it.

    Its header goes first: what does not fit the base is not read any further. The
    digest is that of the very values returned. So a rank looks at the whole file, too,
    but keeps and converts its parts alone; the values of all ranks are all values.

    Args:
        path: The adapter's directory.
        base: The layers that it may change.
        max_rank: Largest rank allowed; None: any.
        cuts: A rank's part of each layer that is split, by its name; None: no rank.

    Raises:
        ModelLoadError: It is damaged, of a kind that is not served, of another base,
            or a value is NaN or infinite; the message names the tensor or the setting.
    """
    files = open_adapter(path)
    targets = match_targets(files.config, files.shapes, base, max_rank)
    content = files.weights()
    tensors = _tensors(path, content)
    if {name: tuple(one.shape) for name, one in tensors.items()} != files.shapes:
        raise ModelLoadError(
            f"{path / WEIGHTS_FILE} changed while it was read; try again"
        )
    pairs: dict[str, LoraPair] = {}
    for target in targets:
        cut = (cuts or {}).get(target.module)
        a = _part(tensors.pop(target.a), cut, "inputs", target.a)
        b = _part(tensors.pop(target.b), cut, "outputs", target.b)
        pairs[target.module] = LoraPair(
            a=_checked(path, target.a, a),
            b=_checked(path, target.b, b),
            scale=target.scale,
        )
    digest = files.digest(content)
    facts = make_facts(
        files.config, targets, origin=base.origin, size=len(content), digest=digest
    )
    return AdapterWeights(facts, pairs)


def _tensors(path: Path, content: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, torch.Tensor] = load(content)
    except SafetensorError as error:
        raise ModelLoadError(
            f"{path / WEIGHTS_FILE} is damaged ({error}); save the adapter again"
        ) from error
    return tensors


def _part(
    tensor: torch.Tensor,
    cut: LayerCut | None,
    side: Literal["inputs", "outputs"],
    name: str,
) -> torch.Tensor:
    """Returns what a rank needs: A is cut where the layer's inputs are, else B."""
    if cut is None or cut.side != side:
        return tensor
    dim = 1 if side == "inputs" else 0
    return read_part(tensor, TensorCut(dim, cut.ranges), f"tensor {name}")


def _checked(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.float()
    if not bool(torch.isfinite(values).all()):
        raise ModelLoadError(
            f"{path / WEIGHTS_FILE}: tensor {name} has NaN or infinity; the adapter is "
            "damaged or its training diverged"
        )
    return values
