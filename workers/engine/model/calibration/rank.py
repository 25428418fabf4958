"""What of a calibration belongs to a rank: scales of its own heads and channels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..checkpoint import iterate
from ..families import kv_shape
from ..headers import read_headers
from .folding import Scales, Shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ...parallel.shard import Shard


@dataclass(slots=True)
class HeadsHere:
    """The `Shape` of one rank's part of a model."""

    model_type: str
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int


def heads_here(config: PreTrainedConfig, shard: Shard | None) -> Shape:
    """Returns what folding asks of a configuration, with a rank's heads.

    Args:
        config: Of the whole model, of the llama pattern.
        shard: The rank; None is the whole model.
    """
    if shard is None:
        return config  # type: ignore[no-any-return]
    from ...parallel.shard import heads_of

    share = heads_of(config, shard)
    return HeadsHere(
        str(config.model_type),
        share.num_queries,
        share.num_keys,
        int(config.num_hidden_layers),
    )


def cut_scales(scales: Scales, config: PreTrainedConfig, shard: Shard | None) -> Scales:
    """Returns a rank's part of a calibration's tensors, named alike.

    What belongs to inputs that every rank has whole stays whole.

    Args:
        scales: Of the whole model; shapes are checked.
        config: Of the whole model.
        shard: The rank; None is the whole model.
    """
    if shard is None:
        return scales
    from ...parallel.shard import heads_of, share_of

    share = heads_of(config, shard)
    head_dim = kv_shape(config).head_dim
    queries = slice(share.queries[0] * head_dim, share.queries[1] * head_dim)
    inner = slice(*share_of(int(config.intermediate_size), shard))
    cut = {}
    for name, values in scales.items():
        owner, _, kind = name.rpartition(".")
        linear = owner.rpartition(".")[2]
        own = values
        if kind in ("key_scale", "value_scale"):
            # A family that norms its heads has one row for all of them.
            own = values[slice(*share.keys)] if len(values) > 1 else values
        elif linear == "output":
            own = values[queries]
        elif linear == "down":
            own = values[inner]
        cut[name] = own
    return cut


def key_value_tensors(
    path: Path, config: PreTrainedConfig, shard: Shard | None, names: re.Pattern[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a checkpoint's tensors, of keys and values a rank's rows alone.

    Args:
        path: The checkpoint, of the llama pattern.
        config: Of the whole model.
        shard: The rank; None yields every tensor whole.
        names: Of the tensors that are looked at.
    """
    if shard is None:
        return iterate(path)
    from ...parallel.reading import TensorCut, iterate_parts
    from ...parallel.shard import heads_of

    first, stop = heads_of(config, shard).keys
    head_dim = kv_shape(config).head_dim
    rows = TensorCut(0, ((first * head_dim, stop * head_dim),))
    wanted = {
        name: rows if "k_proj" in name or "v_proj" in name else None
        for name in read_headers(path)
        if names.search(name)
    }
    return iterate_parts(path, wanted)
