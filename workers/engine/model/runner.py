"""Runs one packed step through transformers' own model code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..kernels.layout import StepLayout
from .rope import LENGTH_DEPENDENT, rope_lengths, rope_type

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..batch import StepBatch
    from ..kv.store import KVStore
    from .attention import StepState

Decoder = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(token ids int64 [tokens], positions int64 [tokens]) -> hidden [tokens, hidden]."""


class RowCounter:
    """Counts rows where they enter the model's first matrix product."""

    def __init__(self) -> None:
        self.rows = 0

    def add(self, rows: int) -> None:
        """Adds rows."""
        self.rows += rows

    def watch(self, first_linear: nn.Module) -> None:
        """Counts at each call of a module."""
        first_linear.register_forward_pre_hook(
            lambda _module, inputs: self.add(inputs[0].numel() // inputs[0].shape[-1])
        )


class GenericDecoder:
    """The model's own modules, whatever the family.

    Args:
        model: With paged attention in place.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._base = model.base_model

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Returns the final hidden states.

        Args:
            token_ids: int64 [tokens], packed.
            positions: int64 [tokens], each in its own sequence.

        Returns:
            [tokens, hidden], after the last norm.
        """
        output = self._base(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            return_dict=True,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


class TransformersRunner:
    """A `ModelRunner` over a loaded model; see `engine/batch.py` for the contract.

    Args:
        model: With weights, paged attention and linear layers in place.
        decoder: Runs the layers; the model's own modules or a fused form of them.
        store: The KV pool.
        state: Shared with the model's attention modules.
        counter: Counts rows at the first matrix product.
        max_context: Most tokens of a sequence.
        eos_token_ids: Ids that end an output.
        weights_version: Names these weights in this precision.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: Decoder,
        store: KVStore,
        state: StepState,
        counter: RowCounter,
        *,
        max_context: int,
        eos_token_ids: frozenset[int],
        weights_version: str,
    ) -> None:
        self.vocab_size = int(model.config.vocab_size)
        self.max_context = max_context
        self.eos_token_ids = eos_token_ids
        self.weights_version = weights_version
        self.block_size = store.block_size
        self.num_blocks = store.num_blocks
        self.kv_bytes = store.nbytes
        self.gemm_rows = 0
        self._decoder = decoder
        self._head: nn.Module = model.get_output_embeddings()
        self._state = state
        self._counter = counter
        self._by_length = rope_type(model.config) in LENGTH_DEPENDENT

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> torch.Tensor:
        """Writes K and V of the batch's tokens and returns logits.

        Args:
            batch: Packed tokens; block tables cover each slice's context.

        Returns:
            float32 [num_rows, vocab_size].
        """
        layout = StepLayout.from_batch(batch, self.block_size)
        lengths = rope_lengths(batch) if self._by_length else None
        self._state.begin(layout, lengths)
        try:
            hidden = self._decoder(torch.from_numpy(batch.token_ids), layout.positions)
            if not len(batch.logit_rows):  # chunks of prompts that go on
                return torch.empty((0, self.vocab_size))
            wanted = torch.from_numpy(batch.logit_rows)
            # The head is the widest layer: only rows that are asked for go through.
            logits: torch.Tensor = self._head(hidden.index_select(0, wanted))
        finally:
            self._state.end()
            self.gemm_rows = self._counter.rows
        return logits.float()
