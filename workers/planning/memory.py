"""What one rank of a model takes of its device's memory, part by part."""

from __future__ import annotations

from typing import Final

import msgspec

from ..engine.model.budget import MARGIN_BYTES, MARGIN_FRACTION, MIB
from ..engine.model.sizes import weight_bytes
from .cards import Card
from .parameters import count_parameters, kv_bytes_per_token, kv_heads_of_rank, share
from .shape import ModelShape

CUDA_BYTES: Final = 700 * MIB
"""A CUDA context with torch's and Triton's kernels and the library's workspace: an
assumption, not measured."""
HOST_BYTES: Final = 450 * MIB
"""A worker's Python with torch and transformers before it has a model."""
NCCL_BYTES: Final = 256 * MIB
"""Buffers of one NCCL communicator: an assumption, not measured."""
_HALF, _FLOAT = 2, 4
_UNPACKED_ON_HOST: Final = 6
"""Bytes a weight while bitsandbytes unpacks a 4-bit layer for a product on a CPU: its
float32 values, and what the product adds; measured at two sizes."""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is run, as far as memory goes."""

    weights: str
    """Precision, one of `sizes.PRECISIONS`."""
    kv: str
    tp: int = 1
    num_blocks: int
    block_size: int
    step_tokens: int
    """Most tokens of a step: running sequences and a prefill chunk."""
    rows: int
    """Most rows of logits of a step."""


class MemoryTable(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device (of one process of a host), by part."""

    linear: int
    head: int
    other: int
    """Embeddings, positions, norms, biases."""
    kv: int
    activations: int
    logits: int
    communication: int
    runtime: int
    """CUDA context, or Python and its libraries on a host."""
    reserve: int
    """Beyond activations, logits and communication, what the engine leaves free."""
    device: int
    """What there is."""

    @property
    def weights(self) -> int:
        """All weights."""
        return self.linear + self.head + self.other

    @property
    def model(self) -> int:
        """What the model takes at its peak: weights, KV and the largest step."""
        step = self.activations + self.logits + self.communication
        return self.weights + self.kv + step

    @property
    def used(self) -> int:
        """All but the reserve."""
        return self.model + self.runtime

    @property
    def free(self) -> int:
        """What is left of the device; less than nothing does not fit."""
        return self.device - self.used - self.reserve


def memory_table(shape: ModelShape, card: Card, use: Use) -> MemoryTable:
    """Predicts what a rank takes.

    Args:
        shape: Of the model.
        card: That it runs on.
        use: How it is run.
    """
    parts = weight_bytes(count_parameters(shape, use.tp), use.weights)
    bias_table = 0
    if shape.alibi:
        bias_table = 4 * shape.num_heads // use.tp * shape.context
    activations = activation_bytes(shape, use, is_host=card.is_host)
    logits = logit_bytes(shape, use, is_host=card.is_host)
    traffic = communication_bytes(shape, use, is_host=card.is_host)
    runtime = HOST_BYTES if card.is_host else CUDA_BYTES
    token_bytes = kv_bytes_per_token(shape, use.kv, use.tp)
    # As when a pool is sized: of what is free once the weights are there.
    free = card.memory_bytes // _sharers(card, use.tp) - runtime - parts.total
    margin = max(MARGIN_BYTES, int(free * MARGIN_FRACTION))
    return MemoryTable(
        linear=parts.linear,
        head=parts.head,
        other=parts.other + bias_table,
        kv=use.num_blocks * use.block_size * token_bytes,
        activations=activations,
        logits=logits,
        communication=traffic,
        runtime=runtime,
        reserve=max(0, margin - activations - logits - traffic),
        device=card.memory_bytes // _sharers(card, use.tp),
    )


def _sharers(card: Card, tp: int) -> int:
    """Returns how many ranks share the memory: those of a host all do."""
    return tp if card.is_host else 1


def activation_bytes(shape: ModelShape, use: Use, *, is_host: bool) -> int:
    """Returns the most that a step's intermediate values take on a rank.

    Args:
        shape: Of the model.
        use: How it is run.
        is_host: On a CPU, where INT8 layers of the fused families keep two buffers.
    """
    heads, kv = shape.num_heads // use.tp, kv_heads_of_rank(shape, use.tp)
    queries, keys = heads * shape.head_dim, kv * shape.head_dim
    inner, hidden = share(shape.inner, use.tp), shape.hidden
    both = queries + 2 * keys
    rotary = 10 * _FLOAT * shape.head_dim
    if is_host and runs_in_kernels(shape, use.weights):
        widest = max(hidden, queries, inner)
        floats = 3 * hidden + widest + max(both, 2 * inner)
        row = _FLOAT * floats + _HALF * widest + rotary
        return use.step_tokens * row
    width = _FLOAT if is_host and use.weights not in _HALVES else _HALF
    if use.weights == "float32":
        width = _FLOAT
    unpacked = 0
    if use.weights == "nf4":  # a layer at a time, the largest is what counts
        largest = hidden * max(inner, queries, share(shape.vocabulary, use.tp))
        unpacked = largest * (_UNPACKED_ON_HOST if is_host else _HALF)
    mlp = (5 if shape.gated else 3) * inner + 2 * hidden
    # Rotation keeps four copies of queries and keys; attention takes and gives floats.
    attention = width * (2 * hidden + both + 4 * (queries + keys))
    attention += _FLOAT * (queries + both) if is_host and width < _FLOAT else 0
    return unpacked + use.step_tokens * (max(width * mlp, attention) + rotary)


_HALVES: Final = frozenset({"bfloat16", "float16"})


def runs_in_kernels(shape: ModelShape, weights: str) -> bool:
    """Returns whether a host runs a layer in one call of its kernels."""
    return weights == "int8" and shape.is_fused and shape.activation == "silu"


def logit_bytes(shape: ModelShape, use: Use, *, is_host: bool) -> int:
    """Returns what logits take at most: the head's output, and in float32.

    With several ranks the leader gathers the parts of all.
    """
    is_half = use.weights in _HALVES or (not is_host and use.weights != "float32")
    width = _FLOAT + (_HALF if is_half else 0)
    whole = use.rows * shape.vocabulary * width
    return whole if use.tp == 1 else 2 * whole


def communication_bytes(shape: ModelShape, use: Use, *, is_host: bool) -> int:
    """Returns buffers of collectives: an all-reduce is as large as a step's rows."""
    if use.tp == 1:
        return 0
    if not is_host:
        return NCCL_BYTES
    return 2 * use.step_tokens * shape.hidden * _FLOAT
