"""Which layers of a base model an adapter's tensors belong to, by name and shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from ....shared.errors import ModelLoadError
from ....shared.typed import shown
from ..model.families import Family, family_of
from ..model.headers import StoredTensor, read_headers
from .completeness import check_complete, trained_on
from .config import AdapterConfig

_TENSOR: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_FOREIGN: Final = (
    ("lora_embedding_", "adapts an embedding"),
    ("lora_magnitude_vector", "belongs to DoRA"),
    ("lora_", "is no weight of a linear LoRA"),
    ("", "replaces a whole weight of the base (modules_to_save)"),
)
"""What a tensor is whose name has this in it; the first that fits."""
_TRANSPOSED: Final = ("gpt2",)
_WEIGHT: Final = ".weight"


class BaseLinears(msgspec.Struct, frozen=True, kw_only=True):
    """The linear layers of a base model that adapters may change."""

    origin: str
    """The base, for messages."""
    prefix: str
    """What stands before names in the model, and is missing in some adapters."""
    layers: str
    """Dotted name of the list of decoder layers."""
    shapes: Mapping[str, tuple[int, int]]
    """(out_features, in_features) by dotted name in the model."""

    def find(self, module: str) -> str | None:
        """Returns a module's name in the model, or None where there is none."""
        return next(
            (one for one in self._spellings(module) if one in self.shapes), None
        )

    def is_inside(self, module: str) -> bool:
        """Returns whether a name, known or not, is one inside a decoder layer."""
        start = f"{self.layers}."
        return any(one.startswith(start) for one in self._spellings(module))

    @property
    def ends(self) -> list[str]:
        """Last parts of the names, as in `target_modules`."""
        return sorted({name.rpartition(".")[2] for name in self.shapes})

    def _spellings(self, module: str) -> tuple[str, str]:
        return module, f"{self.prefix}.{module}"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One adapted layer."""

    module: str
    """Dotted name in the model."""
    rank: int
    scale: float
    """Factor on B @ A."""
    a: str
    """Name of the tensor [rank, in_features]."""
    b: str
    """Name of the tensor [out_features, rank]."""


def base_linears(base: Path) -> BaseLinears:
    """Reads from a checkpoint's headers which layers adapters may change.

    Args:
        base: The base model's directory.

    Raises:
        ModelLoadError: It is damaged or of no supported architecture.
    """
    family = family_of(base)
    stored = read_headers(base)
    turned = is_transposed(family)
    shapes: dict[str, tuple[int, int]] = {}
    for tensor, module in linear_weights(family, stored).items():
        rows, columns = stored[tensor].shape
        shapes[module] = (columns, rows) if turned else (rows, columns)
    return BaseLinears(
        origin=str(base), prefix=prefix_of(family), layers=family.layers, shapes=shapes
    )


def linear_weights(
    family: Family, stored: Mapping[str, StoredTensor]
) -> dict[str, str]:
    """Finds the weights of linear layers inside decoder layers.

    Args:
        family: Of the checkpoint.
        stored: Its tensors.

    Returns:
        The layer's dotted name in the model, by the tensor's in the checkpoint.
    """
    start = f"{family.layers}."
    found: dict[str, str] = {}
    for name, tensor in stored.items():
        inside = name if name.startswith(start) else f"{prefix_of(family)}.{name}"
        is_weight = inside.startswith(start) and inside.endswith(_WEIGHT)
        if is_weight and len(tensor.shape) == 2:  # norms have one dimension
            found[name] = inside.removesuffix(_WEIGHT)
    return found


def is_transposed(family: Family) -> bool:
    """Returns whether a family's checkpoints keep linear weights as [in, out]."""
    return family.model_type in _TRANSPOSED


def prefix_of(family: Family) -> str:
    """Returns what stands before all names inside a family's base model."""
    return family.layers.partition(".")[0]


def match_targets(
    config: AdapterConfig,
    tensors: Mapping[str, tuple[int, ...]],
    base: BaseLinears,
    max_rank: int | None,
) -> tuple[Target, ...]:
    """Finds the layer of each pair of tensors.

    Args:
        config: The adapter's settings.
        tensors: Shapes of its tensors by name.
        base: Where it is to be applied.
        max_rank: Largest rank allowed; None: any.

    Returns:
        Targets in the order of the tensors' names.

    Raises:
        ModelLoadError: A tensor is foreign or of another shape, half of a pair is
            missing, a layer is not the base's, the settings name other layers, or a
            rank is too large.
    """
    halves: dict[str, dict[str, str]] = {}
    spelled: dict[str, str] = {}
    for tensor in sorted(tensors):
        found = _TENSOR.fullmatch(tensor)
        if found is None:
            raise _foreign(config, tensor, base)
        module = _module(config, found[1], base)
        pair = halves.setdefault(module, {})
        spelled[module] = found[1]
        if found[2] in pair:
            raise ModelLoadError(
                f"{config.path}: tensors {pair[found[2]]} and {tensor} are both of "
                f"{module}; expected each once"
            )
        pair[found[2]] = tensor
    if not halves:
        raise ModelLoadError(f"{config.path} adapts no layer: it has no tensors")
    check_complete(config, spelled, base)
    return tuple(
        _target(config, module, pair, tensors, base, max_rank)
        for module, pair in halves.items()
    )


def _foreign(config: AdapterConfig, tensor: str, base: BaseLinears) -> ModelLoadError:
    what = next(remark for part, remark in _FOREIGN if part in tensor)
    return ModelLoadError(
        f"{config.path}: tensor {tensor} {what}, which is not served; adapters may "
        f"change {', '.join(base.ends)} of the decoder layers"
    )


def _module(config: AdapterConfig, name: str, base: BaseLinears) -> str:
    module = base.find(name)
    if module is not None:
        return module
    may = f"adapters may change {', '.join(base.ends)} of its decoder layers"
    if not base.is_inside(name):
        raise ModelLoadError(
            f"{config.path} targets {name}, outside of the decoder layers, which is "
            f"not served; {may}"
        )
    raise ModelLoadError(
        f"{config.path} targets {name}, which {base.origin} does not have: it is an "
        f"adapter of another base{trained_on(config)}; {may}"
    )


def _target(
    config: AdapterConfig,
    module: str,
    pair: Mapping[str, str],
    tensors: Mapping[str, tuple[int, ...]],
    base: BaseLinears,
    max_rank: int | None,
) -> Target:
    if len(pair) < 2:
        missing = "lora_B" if "A" in pair else "lora_A"
        raise ModelLoadError(
            f"{config.path} lacks {missing} of {module}; save the adapter again"
        )
    rank = config.rank_of(module)
    if max_rank is not None and rank > max_rank:
        raise ModelLoadError(
            f"{config.path}: {module} has rank {shown(rank)}; at most {max_rank} is "
            "served (worker.max_adapter_rank)"
        )
    rows, columns = base.shapes[module]
    own = _own_rank(tensors, pair, rows, columns)
    if own not in (None, rank):
        raise ModelLoadError(
            f"{config.path}: its settings (r, rank_pattern) give {module} rank "
            f"{shown(rank)}, and tensor {pair['A']} has rank {own}; bring back the "
            "adapter_config.json that was saved with these weights"
        )
    for half, expected in (("A", (rank, columns)), ("B", (rows, rank))):
        shape = tensors[pair[half]]
        if shape != expected:
            raise ModelLoadError(
                f"{config.path}: tensor {pair[half]} has shape {list(shape)}; rank "
                f"{rank} and {module} of {base.origin} call for {list(expected)}: it "
                f"is an adapter of another base{trained_on(config)}"
            )
    return Target(
        module=module,
        rank=rank,
        scale=config.scale_of(module),
        a=pair["A"],
        b=pair["B"],
    )


def _own_rank(
    tensors: Mapping[str, tuple[int, ...]],
    pair: Mapping[str, str],
    rows: int,
    columns: int,
) -> int | None:
    """The rank of a pair that fits the base's layer whatever the settings say."""
    a, b = tensors[pair["A"]], tensors[pair["B"]]
    fits = len(a) == len(b) == 2 and (b[0], a[1]) == (rows, columns) and a[0] == b[1]
    return a[0] if fits else None
