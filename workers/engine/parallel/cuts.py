"""Which part of each of a model's layers belongs to a rank, family by family.

A layer whose outputs are cut computes some heads or channels from whole inputs; one
whose inputs are cut computes a part of a sum over all ranks (Shoeybi et al. 2019). The
first kind is followed by the second, so that a layer of the model takes two sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from ..model.families import kv_shape
from .shard import Range, Shard, check_degree, head_counts, heads_of, share_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class LayerCut(msgspec.Struct, frozen=True):
    """A rank's part of one layer of the model."""

    side: Literal["outputs", "inputs"]
    """What of it is cut; an embedding's rows are its outputs, one for each token."""
    ranges: tuple[Range, ...]
    """Of the whole width, in the order in which the rank keeps them."""

    @property
    def width(self) -> int:
        """Outputs or inputs of the rank."""
        return sum(stop - start for start, stop in self.ranges)


def layer_cuts(config: PreTrainedConfig, shard: Shard) -> dict[str, LayerCut]:
    """Returns what is cut, by the end of the layer's dotted name.

    Args:
        config: Of a supported family.
        shard: The rank.

    Raises:
        ModelLoadError: The model cannot be split over so many ranks.
    """
    check_degree(config, shard.size)
    vocabulary = LayerCut("outputs", (share_of(int(config.vocab_size), shard),))
    if config.model_type == "gpt2":
        cuts = _gpt2(config, shard)
        return {**cuts, "wte": vocabulary, "lm_head": vocabulary}
    if config.model_type == "falcon":
        cuts = _falcon(config, shard)
        return {**cuts, "word_embeddings": vocabulary, "lm_head": vocabulary}
    cuts = _llama_like(config, shard)
    return {**cuts, "embed_tokens": vocabulary, "lm_head": vocabulary}


def find_cut(cuts: Mapping[str, LayerCut], name: str) -> LayerCut | None:
    """Returns the cut of a layer, or None for one that every rank has whole.

    Args:
        cuts: From `layer_cuts`.
        name: Dotted name in the model.
    """
    for end, cut in cuts.items():
        if name == end or name.endswith("." + end):
            return cut
    return None


def _llama_like(config: PreTrainedConfig, shard: Shard) -> dict[str, LayerCut]:
    share, size = heads_of(config, shard), kv_shape(config).head_dim
    queries, keys = _scaled(share.queries, size), _scaled(share.keys, size)
    width = int(config.intermediate_size)
    inner = share_of(width, shard)
    second = (width + inner[0], width + inner[1])
    return {
        "self_attn.q_proj": LayerCut("outputs", (queries,)),
        "self_attn.k_proj": LayerCut("outputs", (keys,)),
        "self_attn.v_proj": LayerCut("outputs", (keys,)),
        "self_attn.o_proj": LayerCut("inputs", (queries,)),
        "mlp.gate_proj": LayerCut("outputs", (inner,)),
        "mlp.up_proj": LayerCut("outputs", (inner,)),
        "mlp.gate_up_proj": LayerCut(
            "outputs", (inner, second)
        ),  # glm4 has both in one
        "mlp.down_proj": LayerCut("inputs", (inner,)),
    }


def _gpt2(config: PreTrainedConfig, shard: Shard) -> dict[str, LayerCut]:
    hidden = int(config.hidden_size)
    first, last = _scaled(heads_of(config, shard).queries, kv_shape(config).head_dim)
    inner = share_of(int(config.n_inner or 4 * hidden), shard)
    three = tuple((part + first, part + last) for part in (0, hidden, 2 * hidden))
    return {
        "attn.c_attn": LayerCut("outputs", three),
        "attn.c_proj": LayerCut("inputs", ((first, last),)),
        "mlp.c_fc": LayerCut("outputs", (inner,)),
        "mlp.c_proj": LayerCut("inputs", (inner,)),
    }


def _falcon(config: PreTrainedConfig, shard: Shard) -> dict[str, LayerCut]:
    size = kv_shape(config).head_dim
    queries = heads_of(config, shard).queries
    inner = share_of(int(config.ffn_hidden_size), shard)
    return {
        "self_attention.query_key_value": LayerCut(
            "outputs",
            tuple(_scaled(part, size) for part in _falcon_heads(config, shard)),
        ),
        "self_attention.dense": LayerCut("inputs", (_scaled(queries, size),)),
        "mlp.dense_h_to_4h": LayerCut("outputs", (inner,)),
        "mlp.dense_4h_to_h": LayerCut("inputs", (inner,)),
    }


def _falcon_heads(config: PreTrainedConfig, shard: Shard) -> tuple[Range, ...]:
    """Returns which heads of the fused projection a rank has.

    They stand there by KV head: its queries, its key, its value.
    """
    heads, kv_heads = head_counts(config)
    group = heads // kv_heads
    share = heads_of(config, shard)
    if kv_heads % shard.size == 0:
        return (_scaled(share.keys, group + 2),)
    head = share.keys[0]
    moved = head * (group + 2) - head * group  # from query heads to fused heads
    key = head * (group + 2) + group
    return (share.queries[0] + moved, share.queries[1] + moved), (key, key + 2)


def _scaled(part: Range, factor: int) -> Range:
    return part[0] * factor, part[1] * factor
