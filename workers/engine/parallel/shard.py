"""Which part of a model a rank holds: heads and widths, from the configuration alone.

Query heads are split evenly. KV heads are split where the degree divides them; where
there are fewer than ranks, each is kept by several ranks, whose queries share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from ....shared.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Config = Mapping[str, object]
"""The content of a config.json."""
Range = tuple[int, int]
"""First, and one past the last."""

UNIT: Final = 64
"""Widths that no degree divides are cut at multiples of it: whole vector registers."""
_OTHER_NAMES: Final = {
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
}
"""GPT-2's names of what the others call differently."""


class Shard(msgspec.Struct, frozen=True):
    """One rank of a group."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ModelLoadError(
                f"rank {self.rank} of {self.size} does not exist; expected ranks from "
                f"0 to {self.size - 1}"
            )


class HeadShare(msgspec.Struct, frozen=True):
    """The attention heads of one rank."""

    queries: Range
    keys: Range
    """KV heads."""

    @property
    def num_queries(self) -> int:
        """Query heads here."""
        return self.queries[1] - self.queries[0]

    @property
    def num_keys(self) -> int:
        """KV heads here."""
        return self.keys[1] - self.keys[0]


def head_counts(config: PreTrainedConfig | Config) -> tuple[int, int]:
    """Returns (query heads, KV heads) of a supported family's configuration.

    Args:
        config: transformers' object, or what a config.json holds.

    Raises:
        ModelLoadError: It does not say how many heads there are.
    """
    heads = _count(config, "num_attention_heads")
    if heads is None:
        raise ModelLoadError(
            "config.json does not say how many attention heads the model has "
            "(num_attention_heads), so it cannot be split"
        )
    if _get(config, "model_type") == "falcon":
        if _get(config, "new_decoder_architecture"):
            return heads, _count(config, "num_kv_heads") or heads
        multi_query = _get(config, "multi_query")
        return heads, heads if multi_query is False else 1  # transformers' default
    return heads, _count(config, "num_key_value_heads") or heads


def degrees(config: PreTrainedConfig | Config) -> tuple[int, ...]:
    """Returns the numbers of ranks that a model can be split over, rising.

    Args:
        config: transformers' object, or what a config.json holds.

    Raises:
        ModelLoadError: It does not say how many heads there are.
    """
    heads, kv_heads = head_counts(config)
    return tuple(
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    )


def check_degree(config: PreTrainedConfig | Config, size: int) -> None:
    """Refuses a number of ranks that a model cannot be split over.

    Args:
        config: transformers' object, or what a config.json holds.
        size: Ranks.

    Raises:
        ModelLoadError: It cannot; the message lists those that work.
    """
    fitting = degrees(config)
    if size in fitting:
        return
    heads, kv_heads = head_counts(config)
    raise ModelLoadError(
        f"tp={size} does not fit a model of {heads} query heads and {kv_heads} KV "
        "heads: query heads must divide evenly, and KV heads too, or the degree be a "
        f"multiple of them; degrees that work are {', '.join(map(str, fitting))}"
    )


def heads_of(config: PreTrainedConfig | Config, shard: Shard) -> HeadShare:
    """Returns a rank's heads.

    Args:
        config: Of a model whose degree was checked.
        shard: The rank.
    """
    heads, kv_heads = head_counts(config)
    queries = heads // shard.size
    first = shard.rank * queries
    if kv_heads % shard.size == 0:
        keys = kv_heads // shard.size
        start = shard.rank * keys
    else:  # several ranks keep the same one
        keys, start = 1, shard.rank * kv_heads // shard.size
    return HeadShare((first, first + queries), (start, start + keys))


def share_of(total: int, shard: Shard) -> Range:
    """Returns a rank's part of a width that may be cut anywhere: MLPs, vocabulary.

    Equal parts where the degree divides it, else whole units with the rest on the last
    rank, and single elements where there are too few units.

    Args:
        total: The width.
        shard: The rank.
    """
    unit = 1 if total % shard.size == 0 or total < UNIT * shard.size else UNIT
    units = total // unit
    start = units * shard.rank // shard.size * unit
    last = shard.rank + 1 == shard.size
    stop = total if last else units * (shard.rank + 1) // shard.size * unit
    return start, stop


def _get(config: PreTrainedConfig | Config, name: str) -> object:
    if isinstance(config, Mapping):
        found = config.get(name)
        return config.get(_OTHER_NAMES.get(name, name)) if found is None else found
    return getattr(config, name, None)


def _count(config: PreTrainedConfig | Config, name: str) -> int | None:
    value = _get(config, name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(
            f"config.json: {name} is {value!r}; expected a whole number from 1"
        )
    return value
