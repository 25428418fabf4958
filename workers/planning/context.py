"""How long a sequence a configuration allows for, RoPE scaling included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_STRETCHING: Final = frozenset({"linear", "dynamic"})
"""Scalings that multiply `max_position_embeddings` by their factor."""


def context_limit(config: Mapping[str, object], positions: int) -> int:
    """Returns the longest sequence in tokens, as the engine reads it.

    Args:
        config: The content of a `config.json`, of any age: RoPE's scaling was called
            `rope_scaling` before it was `rope_parameters`.
        positions: Its `max_position_embeddings`.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return positions
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = scaling.get("factor")
    if not isinstance(factor, int | float):
        return positions
    if kind in _STRETCHING:
        return int(positions * factor)
    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings", positions)
        return max(positions, int(original * factor))
    return positions
