"""How many parameters a rank of a model holds, by part, and the bytes of its KV."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

import msgspec

from ..engine.model.sizes import Parameters
from ..engine.parallel.shard import Shard, share_of
from .shape import ModelShape

KV_KINDS: Final = ("float32", "int8", "int4")
"""Precisions of the KV pool, the most exact first."""
_INT4_GROUP: Final = 16
"""Elements of a head that share one scale of an INT4 pool."""


class Linear(msgspec.Struct, frozen=True):
    """One linear layer of a decoder layer, as one rank has it."""

    inputs: int
    outputs: int
    bias: bool

    @property
    def size(self) -> int:
        """Values of its weight."""
        return self.inputs * self.outputs


@functools.lru_cache(maxsize=1024)
def share(width: int, tp: int) -> int:
    """Returns the largest part of a width that is cut over `tp` ranks."""
    parts = (share_of(width, Shard(rank, tp)) for rank in range(tp))
    return max(stop - start for start, stop in parts)


def kv_heads_of_rank(shape: ModelShape, tp: int) -> int:
    """Returns the KV heads of a rank: those that are fewer than ranks are repeated."""
    return max(1, shape.num_kv_heads // tp)


def linears(shape: ModelShape, tp: int = 1) -> Iterator[Linear]:
    """Yields a decoder layer's products as one of `tp` ranks has them.

    Queries, keys and values are told apart and so are gate and up, also where a family
    keeps them in one tensor: sizes add up the same.

    Args:
        shape: Of the model.
        tp: Ranks; one of the degrees that work.
    """
    queries = shape.num_heads // tp * shape.head_dim
    keys = kv_heads_of_rank(shape, tp) * shape.head_dim
    inner = share(shape.inner, tp)
    yield Linear(shape.hidden, queries, shape.qkv_bias)
    yield Linear(shape.hidden, keys, shape.qkv_bias)
    yield Linear(shape.hidden, keys, shape.qkv_bias)
    yield Linear(queries, shape.hidden, shape.output_bias)
    for _ in range(2 if shape.gated else 1):
        yield Linear(shape.hidden, inner, shape.up_bias)
    yield Linear(inner, shape.hidden, shape.down_bias)


def count_parameters(shape: ModelShape, tp: int = 1) -> Parameters:
    """Counts what the rank with most of them holds.

    Args:
        shape: Of the model.
        tp: Ranks that the vocabulary, heads and MLP are split over; norms, positions
            and the bias after a split product are on each.
    """
    layer = list(linears(shape, tp))
    biases = sum(one.outputs for one in layer if one.bias)
    vocabulary = share(shape.vocabulary, tp)
    embedding = vocabulary * shape.hidden
    in_layers = shape.num_layers * (biases + shape.layer_norms)
    return Parameters(
        linear=shape.num_layers * sum(one.size for one in layer),
        head=embedding,
        other=embedding + shape.positions * shape.hidden + shape.final_norm + in_layers,
        tied=shape.tied,
        linear_rows=shape.num_layers * sum(one.outputs for one in layer),
        head_rows=vocabulary,
        embedding=embedding,
    )


def kv_bytes_per_token(shape: ModelShape, kind: str, tp: int = 1) -> int:
    """Returns the bytes that one token of one sequence takes in a rank's pool.

    Args:
        shape: Of the model.
        kind: One of `KV_KINDS`.
        tp: Ranks that the KV heads are split over.
    """
    dim = shape.head_dim
    vector = {
        "float32": 4 * dim,
        "int8": dim + 4,  # and a float32 scale
        "int4": -(-dim // 2) + 2 * -(-dim // _INT4_GROUP),  # bfloat16 scales
    }[kind]
    return 2 * shape.num_layers * kv_heads_of_rank(shape, tp) * vector
