"""Runs one packed step through transformers' own model code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ....shared.errors import EngineError
from ..kernels.layout import StepLayout
from .device import Target, place_layout, release_caches
from .rope import LENGTH_DEPENDENT, rope_lengths, rope_type

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..adapters.applying import StepAdapters
    from ..batch import StepBatch
    from ..kv.store import KVStore
    from .assembly import Checkpoint
    from .attention import StepState
    from .gpu.cuda_graphs import Gain
    from .gpu.graphs import DecodeGraphs

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
        target: The device that the model and the pool are on.
        scratch_blocks: Blocks at the pool's end that no sequence may own.
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
        target: Target,
        *,
        scratch_blocks: int = 0,
        max_context: int,
        eos_token_ids: frozenset[int],
        weights_version: str,
    ) -> None:
        self.vocab_size = int(model.config.vocab_size)
        self.max_context = max_context
        self.eos_token_ids = eos_token_ids
        self.weights_version = weights_version
        self.block_size = store.block_size
        self.num_blocks = store.num_blocks - scratch_blocks
        self.kv_bytes = store.nbytes
        self.gemm_rows = 0
        self.target = target
        self.graphs: DecodeGraphs | None = None
        """Takes the decode steps that fit it, once it is set."""
        self.graph_gains: tuple[Gain, ...] = ()
        """What they save, measured at start."""
        self.base: tuple[Checkpoint, StepState]
        """What it is made of; adapters attach to it."""
        self.adapters: StepAdapters | None = None
        """Runs the steps that have adapters, once it is set."""
        self.model = model
        self._decoder = decoder
        self._head: nn.Module = model.get_output_embeddings()
        self._state = state
        self._counter = counter
        self._lengths: torch.Tensor | None = None
        self._by_length = rope_type(model.config) in LENGTH_DEPENDENT
        self.kv_depends_on_length = self._by_length

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> torch.Tensor:
        """Writes K and V of the batch's tokens and returns logits.

        Args:
            batch: Packed tokens; block tables cover each slice's context.

        Returns:
            float32 [num_rows, vocab_size] on the model's device.
        """
        before = self._counter.rows
        try:
            if batch.adapters:  # launched: graphs know the base model alone
                return self._run_adapted(batch)
            logits = None if self.graphs is None else self.graphs.run(batch)
            if logits is None:
                return self._run_packed(batch)
            # A replay calls no module, and padding rows are nobody's tokens.
            self._counter.rows = before + len(batch.token_ids)
            return logits
        finally:
            self.gemm_rows += self._counter.rows - before

    @torch.inference_mode()
    def rehearse(self, batch: StepBatch) -> None:
        """Runs a step that nobody asked for, launched, and counts none of its rows.

        Args:
            batch: Its blocks are scratch, which no sequence owns.
        """
        self._run_packed(batch)

    def _run_adapted(self, batch: StepBatch) -> torch.Tensor:
        if self.adapters is None:
            raise EngineError("a step has adapters, and this runner serves none")
        with self.adapters.applied(batch):
            return self._run_packed(batch)

    def _run_packed(self, batch: StepBatch) -> torch.Tensor:
        device = self.target.device
        layout = place_layout(
            StepLayout.from_batch(batch, self.block_size), self.target
        )
        self._lengths = rope_lengths(batch) if self._by_length else None
        token_ids = torch.from_numpy(batch.token_ids).to(device, non_blocking=True)
        wanted = torch.from_numpy(batch.logit_rows).to(device, non_blocking=True)
        return self.forward(token_ids, layout, wanted)

    def forward(
        self,
        token_ids: torch.Tensor,
        layout: StepLayout,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the model on what is on its device already.

        Args:
            token_ids: int64 [tokens].
            layout: The step's; placed on the device.
            wanted: int64 [rows], packed indices whose logits are wanted; None is all.

        Returns:
            float32 [rows, vocab_size].
        """
        self._state.begin(layout, self._lengths)
        try:
            hidden = self._decoder(token_ids, layout.positions)
            if wanted is not None:
                if not len(wanted):  # chunks of prompts that go on
                    return hidden.new_empty((0, self.vocab_size), dtype=torch.float32)
                # The head is the widest layer: only rows asked for go through.
                hidden = hidden.index_select(0, wanted)
            logits: torch.Tensor = self._head(hidden)
        finally:
            self._state.end()
        return logits.float()

    def release_caches(self) -> None:
        """Gives what the device's allocator keeps unused back to it.

        To be called when memory has run out and never else: it waits for the device,
        and the next steps allocate anew.
        """
        release_caches(self.target.device)
