"""How much memory weights and KV take, and how large a pool fits."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import psutil

from ....shared.errors import ModelLoadError
from ..kv.store import KVKind, KVShape
from .checkpoint import shard_files
from .families import family_of, kv_shape
from .rope import context_limit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MIB: Final = 1024 * 1024
MARGIN_FRACTION: Final = 0.1
"""Share of free memory that the pool leaves alone."""
MARGIN_BYTES: Final = 512 * MIB
"""Least that the pool leaves: activations, logits and the Python heap live there."""
_EMBEDDINGS: Final = ("embed_tokens", "word_embeddings", "wte", "wpe")
_KINDS: Final[tuple[KVKind, ...]] = ("int8", "float32")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Returns bytes this process may still take: of the host, within its cgroup."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        statistics = (_CGROUP / "memory.stat").read_text()
    except (OSError, ValueError):
        return available  # no cgroup v2 here: the host's figure stands
    if limit == "max":
        return available
    cached = 0
    for line in statistics.splitlines():
        if line.startswith("inactive_file "):
            cached = int(line.split()[1])  # given back under pressure
    return min(available, int(limit) - used + cached)


def pool_blocks(
    shape: KVShape, *, kind: KVKind, block_size: int, kv_memory_mb: int
) -> int:
    """Returns how many KV blocks fit.

    The pool takes what `kv_memory_mb` allows, but leaves a margin of the memory that is
    free: a tenth of it, and 512 MiB at least.

    Args:
        shape: The model's keys and values.
        kind: Precision of the pool.
        block_size: Tokens per block.
        kv_memory_mb: Upper bound of the pool in MiB.

    Raises:
        ModelLoadError: Not even one block fits.
    """
    free = free_memory()
    margin = max(MARGIN_BYTES, int(free * MARGIN_FRACTION))
    room = min(kv_memory_mb * MIB, free - margin)
    per_block = shape.bytes_per_token(kind) * block_size
    if room < per_block:
        raise ModelLoadError(
            f"no KV block of {per_block} bytes fits: {free // MIB} MiB are free, "
            f"{margin // MIB} MiB are kept as a margin, and kv_memory_mb is "
            f"{kv_memory_mb}; free memory, raise kv_memory_mb or use kv='int8'"
        )
    return room // per_block


def describe(
    path: Path,
    *,
    block_size: int = 8,
    num_blocks: int | None = None,
    kv_memory_mb: int = 1024,
    max_context: int | None = None,
) -> dict[str, object]:
    """Tells what a model would take, without loading it.

    Args:
        path: A checkpoint directory.
        block_size: Tokens per KV block.
        num_blocks: Blocks of the pool; None sizes it from free memory.
        kv_memory_mb: Upper bound of the pool in MiB.
        max_context: Cap on a sequence's tokens.

    Returns:
        Plain values, fit for JSON: family, parameters, weight bytes by precision, and
        by KV precision the bytes per token, blocks, tokens and full-length sequences
        that fit.

    Raises:
        ModelLoadError: Unsupported or unreadable.
    """
    family = family_of(path)
    config = family.load_config(path)
    shape = kv_shape(config)
    limit = context_limit(config)
    context = min(limit, max_context or limit)
    counts = count_parameters(path, config)
    return {
        "path": str(path),
        "family": family.model_type,
        "missing_files": missing_files(path),
        "parameters": counts.total,
        "layers": shape.num_layers,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocabulary": int(config.vocab_size),
        "max_context": context,
        "block_size": block_size,
        "weights_bytes": weight_bytes(counts),
        "kv": {
            kind: _pool_facts(
                shape, kind, context, block_size, num_blocks, kv_memory_mb
            )
            for kind in _KINDS
        },
        "free_memory_bytes": free_memory(),
    }


def _pool_facts(
    shape: KVShape,
    kind: KVKind,
    context: int,
    block_size: int,
    num_blocks: int | None,
    kv_memory_mb: int,
) -> dict[str, int]:
    blocks = num_blocks or pool_blocks(
        shape, kind=kind, block_size=block_size, kv_memory_mb=kv_memory_mb
    )
    tokens = blocks * block_size
    return {
        "bytes_per_token": shape.bytes_per_token(kind),
        "blocks": blocks,
        "tokens": tokens,
        "bytes": tokens * shape.bytes_per_token(kind),
        "sequences_of_max_context": tokens // context,
    }


class Parameters(msgspec.Struct, frozen=True):
    """How many parameters a checkpoint has, by what quantizing does to them."""

    linear: int
    """Of linear layers, the output head apart."""
    head: int
    other: int
    """Embeddings, norms, biases: never below 16 bits."""
    tied: bool
    """The head is the embedding, stored once until it is quantized."""

    @property
    def total(self) -> int:
        """Every parameter once."""
        return self.linear + self.other + (0 if self.tied else self.head)


def weight_bytes(counts: Parameters) -> dict[str, int]:
    """Returns bytes of weights in memory by precision."""
    quantized = counts.linear + counts.head
    return {
        "float32": 4 * counts.total,
        "bfloat16": 2 * counts.total,
        "int8": quantized + 4 * counts.other,
        # 4.127 bits each: 64 values share an 8-bit scale, 256 scales a float.
        "nf4": int(quantized * 4.127 / 8) + 4 * counts.other,
    }


def count_parameters(path: Path, config: PreTrainedConfig) -> Parameters:
    """Counts a checkpoint's parameters from its safetensors headers alone."""
    linear = other = head = 0
    for name, shape in tensor_shapes(path).items():
        size = math.prod(shape)
        if name.startswith("lm_head"):
            head += size
        elif len(shape) == 2 and not any(part in name for part in _EMBEDDINGS):
            linear += size
        else:
            other += size
    vocabulary = int(config.vocab_size) * int(config.hidden_size)
    return Parameters(linear, head or vocabulary, other, tied=head == 0)


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Reads names and shapes from the headers of a checkpoint's shards."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in shard_files(path):
        try:
            shapes |= _shapes_of(file)
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            struct.error,
        ) as error:
            raise ModelLoadError(
                f"{file} is not a whole safetensors file ({error}); fetch the "
                "checkpoint again"
            ) from error
    return shapes


def _shapes_of(file: Path) -> dict[str, tuple[int, ...]]:
    """Reads one shard's header; raises whatever is wrong with it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > size - 8:
            raise ValueError(f"its header is {length} bytes long, the file {size}")
        header = json.loads(stream.read(length))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if 8 + length + end > size:
        raise ValueError(f"it is cut short: {size} of {8 + length + end} bytes")
    return {name: tuple(map(int, entry["shape"])) for name, entry in entries.items()}


def missing_files(path: Path) -> list[str]:
    """Names what a worker needs besides config and weights and does not find."""
    return [name for name in ("tokenizer.json",) if not (path / name).is_file()]
