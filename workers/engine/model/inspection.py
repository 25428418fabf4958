"""What `tokenmill inspect` tells of a model: its sizes, and what fits into memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec

from ..kv.store import KVKind
from .budget import TYPICAL_TOKENS, FreeMemory, PoolBudget, pool_budget
from .calibration.files import find_calibration
from .calibration.result import calibration_facts
from .checking import check_checkpoint
from .device import check_device
from .families import family_of, kv_shape
from .headers import read_headers
from .lean_import import import_transformers
from .rope import context_limit
from .sizes import (
    PRECISIONS,
    count_parameters,
    precision_of,
    read_bytes,
    weight_bytes,
)

if TYPE_CHECKING:
    from ..kv.store import KVShape
    from .sizes import Parameters, PartBytes

KINDS: Final[tuple[KVKind, ...]] = get_args(KVKind)
"""Precisions of the KV pool."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """How a model would be run."""

    weights: str = "int8"
    kv: KVKind = "int8"
    block_size: int = 8
    num_blocks: int | None = None
    """None sizes the pool from free memory."""
    kv_memory_mb: int | None = 1024
    max_context: int | None = None
    typical_tokens: int = TYPICAL_TOKENS
    device: str = "cpu"
    memory_bytes: int | None = None
    """Of a device that is not this one; None looks at what is free here."""


def describe(path: Path, question: Question | None = None) -> dict[str, Any]:
    """Tells what a model would take, without loading it.

    Args:
        path: A checkpoint directory.
        question: How it would be run.

    Returns:
        Plain values, fit for JSON: the model's shape, bytes of weights by precision and
        part, and by KV precision the bytes per token and what fits.

    Raises:
        ModelLoadError: A worker would refuse it, too.
    """
    ask = question or Question()
    check_device(ask.weights, ask.device)
    family = family_of(path)
    import_transformers()
    config = family.load_config(path)
    shape = kv_shape(config)
    limit = context_limit(config)
    context = min(limit, ask.max_context or limit)
    tensors = read_headers(path)
    check_checkpoint(path, family, config, tensors)
    counts = count_parameters(tensors, config)
    return {
        "path": str(path),
        "family": family.model_type,
        "stored_as": sorted({tensor.dtype for tensor in tensors.values()}),
        "layers": shape.num_layers,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocabulary": int(config.vocab_size),
        "max_context": context,
        "calibration": calibration_facts(path),
        **_weights(path, counts, shape, context, ask),
    }


def _weights(
    path: Path, counts: Parameters, shape: KVShape, context: int, ask: Question
) -> dict[str, Any]:
    """Returns what weights take, and what of KV fits beside them."""
    sizes = {name: weight_bytes(counts, name) for name in PRECISIONS}
    sizes["int8"] = _with_second_planes(path, sizes["int8"])
    taken = sizes[precision_of(ask.weights)].total
    pools = {kind: _budget(shape, kind, ask, taken) for kind in KINDS}
    return {
        "parameters": counts.total,
        "parameters_by_part": {
            "linear": counts.linear,
            "head": 0 if counts.tied else counts.head,
            "other": counts.other,
        },
        "tied_head": counts.tied,
        "products_per_token": counts.linear + counts.head,
        "weights": ask.weights,
        "weights_bytes": {name: size.total for name, size in sizes.items()},
        "weights_read_bytes": {name: read_bytes(counts, name) for name in PRECISIONS},
        "weights_by_part": {name: _parts(size) for name, size in sizes.items()},
        "kv_kind": ask.kv,
        "kv_bytes_per_token": {
            **{kind: shape.bytes_per_token(kind) for kind in KINDS},
            "float16": shape.bytes_per_token("float32") // 2,
        },
        "block_size": ask.block_size,
        "typical_tokens": ask.typical_tokens,
        "kv": {kind: _fits(budget, context, ask) for kind, budget in pools.items()},
        "memory": _memory(pools[ask.kv]),
    }


def _with_second_planes(path: Path, size: PartBytes) -> PartBytes:
    """Adds what the layers that calibration found to be sensitive take on top."""
    calibration = find_calibration(path).calibration
    if calibration is None:
        return size
    extra = sum(layer.parameters for layer in calibration.facts.sensitive)
    return msgspec.structs.replace(size, linear=size.linear + extra)


def _parts(size: PartBytes) -> dict[str, int]:
    return {"linear": size.linear, "head": size.head, "other": size.other}


def _budget(shape: KVShape, kind: KVKind, ask: Question, weights: int) -> PoolBudget:
    given = ask.memory_bytes
    return pool_budget(
        shape,
        kind=kind,
        block_size=ask.block_size,
        kv_memory_mb=ask.kv_memory_mb,
        device=ask.device,
        reserved=weights,
        free=None if given is None else FreeMemory(given, "as given"),
    )


def _fits(budget: PoolBudget, context: int, ask: Question) -> dict[str, int]:
    blocks = ask.num_blocks or budget.blocks

    def sequences(tokens: int) -> int:
        return blocks // -(-tokens // ask.block_size)

    return {
        "bytes_per_token": budget.block_bytes // ask.block_size,
        "blocks": blocks,
        "tokens": blocks * ask.block_size,
        "bytes": blocks * budget.block_bytes,
        "sequences_of_max_context": sequences(context),
        "sequences_of_typical_tokens": sequences(ask.typical_tokens),
    }


def _memory(budget: PoolBudget) -> dict[str, object]:
    return {
        "free_bytes": budget.free.size,
        "free_according_to": budget.free.source,
        "margin_bytes": budget.margin,
        "weights_bytes": budget.reserved,
        "kv_limit_bytes": budget.limit,
        "pool_room_bytes": budget.room,
    }
