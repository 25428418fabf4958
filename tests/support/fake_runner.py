"""A model whose logits are a hash of all it can see through the block tables.

A wrong block, position, chunk border or token changes the hash, hence the tokens.
"""

import hashlib

import numpy as np
import torch

from tokenmill.workers.engine.batch import StepBatch

VOCAB = 97
EOS = 96


def context_logits(token_ids, vocab_size: int = VOCAB) -> np.ndarray:
    """float32 [vocab_size] for the token after `token_ids`, from nothing else."""
    digest = hashlib.blake2b(np.array(token_ids, np.int64).tobytes(), digest_size=8)
    generator = np.random.Generator(
        np.random.Philox(key=int.from_bytes(digest.digest(), "little"))
    )
    return generator.standard_normal(vocab_size, np.float32) * 3


class FakeRunner:
    """Implements `ModelRunner` on a table of (block, offset) -> (token, position)."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_context: int = 128,
        vocab_size: int = VOCAB,
        eos_token_ids: frozenset[int] = frozenset({EOS}),
    ) -> None:
        self.weights_version = "fake"
        self.kv_depends_on_length = False
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.eos_token_ids = eos_token_ids
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.gemm_rows = 0
        self.batches: list[StepBatch] = []
        self.poison: dict[int, float] = {}
        """token id -> value put into the logits of a context that ends in it."""
        self.fail: Exception | None = None
        """Raised by the next runs while set."""
        self.max_rows: int | None = None
        """Packed tokens beyond which memory runs out."""
        self._tokens = np.full((num_blocks, block_size), -1, np.int64)
        self._positions = np.full((num_blocks, block_size), -1, np.int64)

    def run(self, batch: StepBatch) -> torch.Tensor:
        if self.fail is not None:
            raise self.fail
        if self.max_rows is not None and len(batch.token_ids) > self.max_rows:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        self.batches.append(batch)
        self.gemm_rows += len(batch.token_ids)
        at = 0
        for part in batch.slices:
            assert part.query_start == at, "slices are packed without gaps"
            at += part.query_length
            self._write(batch, part)
        assert at == len(batch.token_ids)
        rows = [self._logits(batch, int(row)) for row in batch.logit_rows]
        stacked = np.stack(rows) if rows else np.empty((0, self.vocab_size), np.float32)
        return torch.from_numpy(stacked)

    def _write(self, batch: StepBatch, part) -> None:
        assert len(part.block_table) == -(-part.context_length // self.block_size)
        for row in range(part.query_start, part.query_start + part.query_length):
            position = int(batch.positions[row])
            block = part.block_table[position // self.block_size]
            self._tokens[block, position % self.block_size] = batch.token_ids[row]
            self._positions[block, position % self.block_size] = position

    def _logits(self, batch: StepBatch, row: int) -> np.ndarray:
        part = next(
            one
            for one in batch.slices
            if one.query_start <= row < one.query_start + one.query_length
        )
        length = int(batch.positions[row]) + 1
        blocks = list(part.block_table)
        tokens = self._tokens[blocks].reshape(-1)[:length]
        positions = self._positions[blocks].reshape(-1)[:length]
        visible = np.where(positions == np.arange(length), tokens, -1)
        logits = context_logits(visible, self.vocab_size)
        value = self.poison.get(int(visible[-1]))
        if value is not None:
            logits[5] = value
        return logits
