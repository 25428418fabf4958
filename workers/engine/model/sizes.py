"""How many bytes a checkpoint's weights take in memory, by precision and by part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from .headers import FLOAT_BYTES, NOT_WEIGHTS, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from transformers import PreTrainedConfig

PRECISIONS: Final = ("float32", "bfloat16", "float16", "int8", "nf4")
"""Of the weights, the most exact first."""
NF4_BITS: Final = 4.127
"""64 values share an 8-bit scale, 256 of those a float: double quantization."""
_SCALE_BYTES: Final = 4
_INPUT_EMBEDDINGS: Final = ("embed_tokens", "word_embeddings", "wte")
_EMBEDDINGS: Final = (*_INPUT_EMBEDDINGS, "wpe")
_VIEWED: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def precision_of(weights: str) -> str:
    """Returns the precision of a way to keep weights: "int8" of "int8-bnb"."""
    return weights.partition("-")[0]


class Parameters(msgspec.Struct, frozen=True):
    """How many parameters a checkpoint has, by what quantizing does to them."""

    linear: int
    """Of linear layers, the output head apart."""
    head: int
    other: int
    """Embeddings, norms, biases: never below 16 bits."""
    tied: bool
    """The head is the embedding, stored once until it is quantized."""
    linear_rows: int = 0
    """Output channels of linear layers, each with a scale of its own in INT8."""
    head_rows: int = 0
    embedding: int = 0
    """Of `other`, the input embedding: beside quantized layers it is float16."""

    @property
    def total(self) -> int:
        """Every parameter once."""
        return self.linear + self.other + (0 if self.tied else self.head)


class PartBytes(msgspec.Struct, frozen=True):
    """Bytes of weights in memory."""

    linear: int
    head: int
    other: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.linear + self.head + self.other


def count_parameters(
    tensors: Mapping[str, StoredTensor], config: PreTrainedConfig
) -> Parameters:
    """Counts a checkpoint's parameters by part.

    Args:
        tensors: From `read_headers`.
        config: Of the same checkpoint.
    """
    linear = other = head = rows = embedding = 0
    transposed = config.model_type == "gpt2"  # its linear layers are [in, out]
    for name, tensor in tensors.items():
        if name.endswith(NOT_WEIGHTS):
            continue
        if name.startswith("lm_head"):
            head += tensor.size
        elif len(tensor.shape) == 2 and not any(part in name for part in _EMBEDDINGS):
            linear += tensor.size
            rows += tensor.shape[1 if transposed else 0]
        else:
            other += tensor.size
            if any(part in name for part in _INPUT_EMBEDDINGS):
                embedding += tensor.size
    vocabulary = int(config.vocab_size)
    return Parameters(
        linear=linear,
        head=head or vocabulary * int(config.hidden_size),
        other=other,
        tied=head == 0,
        linear_rows=rows,
        head_rows=vocabulary,
        embedding=embedding,
    )


def weight_bytes(counts: Parameters, precision: str) -> PartBytes:
    """Returns the bytes of weights in memory.

    A tied head takes none in a float precision. Quantized, it is a copy of its own,
    since the embedding stays a float, of 16 bits.

    Args:
        counts: Of the checkpoint.
        precision: One of `PRECISIONS`.
    """
    if precision in _VIEWED:
        width = FLOAT_BYTES[_VIEWED[precision]]
        head = 0 if counts.tied else counts.head
        return PartBytes(width * counts.linear, width * head, width * counts.other)
    if precision == "nf4":
        linear, head = (
            int(count * NF4_BITS / 8) for count in (counts.linear, counts.head)
        )
    else:
        linear = counts.linear + _SCALE_BYTES * counts.linear_rows
        head = counts.head + _SCALE_BYTES * counts.head_rows
    return PartBytes(linear, head, 4 * counts.other - 2 * counts.embedding)


def mapped_bytes(
    tensors: Mapping[str, StoredTensor],
    precision: str,
    copied: Collection[str] = (),
) -> int:
    """Returns the bytes of weights that stay views of the checkpoint's files.

    Their pages count as free memory, which a system may take back; a pool that took
    them would make every step read the weights from disk again.

    Args:
        tensors: From `read_headers`.
        precision: Of the weights in memory. Quantized ones are copies, as are floats
            that are stored in another type.
        copied: Names of layers whose weights are copies all the same.
    """
    kept = _VIEWED.get(precision)
    return sum(
        tensor.size * FLOAT_BYTES[tensor.dtype]
        for name, tensor in tensors.items()
        if tensor.dtype == kept and name.removesuffix(".weight") not in copied
    )


def read_bytes(counts: Parameters, precision: str) -> int:
    """Returns the bytes of weights that each step reads: layers and head.

    Of the embedding only a few rows are looked up, unless it is the head as well.

    Args:
        counts: Of the checkpoint.
        precision: One of `PRECISIONS`.
    """
    size = weight_bytes(counts, precision)
    if counts.tied and precision in _VIEWED:
        head = FLOAT_BYTES[_VIEWED[precision]] * counts.head
        return size.linear + head
    return size.linear + size.head
