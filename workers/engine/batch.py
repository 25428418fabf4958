"""One step's packed input, and what a model runner must do with it."""

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import torch


class SequenceSlice(msgspec.Struct, frozen=True):
    """The part of a step that belongs to one sequence."""

    query_start: int
    """Index of its first token in the packed batch."""
    query_length: int
    """Tokens of it in this step: 1 in decode, a chunk in prefill."""
    context_length: int
    """Tokens whose K and V stand in its blocks once this step has written its own."""
    block_table: tuple[int, ...]
    """KV block ids, enough for `context_length` tokens."""
    prompt_length: int = 0
    """Tokens of its whole prompt, for RoPE scalings that look at the length (dynamic,
    longrope); 0 lets each token look at its own position alone."""


class StepBatch(msgspec.Struct, frozen=True):
    """Packed tokens of several sequences, no padding."""

    token_ids: "np.ndarray"
    """int64 [num_tokens]."""
    positions: "np.ndarray"
    """int64 [num_tokens]; position in the own sequence."""
    slices: tuple[SequenceSlice, ...]
    """In packed order; their lengths sum to num_tokens."""
    logit_rows: "np.ndarray"
    """int64 [num_rows]: packed indices whose logits are wanted, rising."""
    adapters: tuple[str | None, ...] = ()
    """Key of each slice's adapter, None without; empty when no slice has one."""


class ModelRunner(Protocol):
    """Runs the model over one packed step. Implementations: model.runner, tests.

    A method `release_caches()`, where there is one, is called when memory ran out: it
    gives back what the device's allocator keeps unused.
    """

    weights_version: str
    """Names the weights in their precision: K and V of others are never shared."""
    kv_depends_on_length: bool
    """Whether K and V of a token depend on its prompt's length (RoPE scalings that
    look at it), so that only prompts of one length can share them."""
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    block_size: int
    num_blocks: int
    gemm_rows: int
    """Rows that went through the first quantized linear: equals scheduled tokens."""

    def run(self, batch: StepBatch) -> "torch.Tensor":
        """Writes K and V of the batch's tokens and returns logits.

        Args:
            batch: Packed tokens; block tables cover each slice's context.

        Returns:
            float32 [num_rows, vocab_size] on CPU or the model's device.
        """
        ...
