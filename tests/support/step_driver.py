"""Drives a model runner without an engine: packs steps, keeps block tables."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from support.generate_reference import NEAR_TIE

from tokenmill.workers.engine.batch import ModelRunner, SequenceSlice, StepBatch


@dataclass
class Sequence:
    """One sequence on its way through the runner."""

    prompt: list[int]
    max_tokens: int
    blocks: list[int] = field(default_factory=list)
    done: int = 0
    """Tokens whose K and V are stored."""
    output: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    """Of each output token."""
    adapter: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt + self.output

    @property
    def finished(self) -> bool:
        """All output is there."""
        return len(self.output) == self.max_tokens


class StepDriver:
    """Greedy continuous batching, all sequences at once, prefill in chunks.

    Args:
        runner: What is tested.
        chunk: Prompt tokens of one sequence in a step at most.
        seed: Of the order in which blocks are handed out.
    """

    def __init__(self, runner: ModelRunner, *, chunk: int, seed: int = 0) -> None:
        self._runner = runner
        self._chunk = chunk
        shuffled = np.random.default_rng(seed).permutation(runner.num_blocks)
        self._free = [int(block) for block in shuffled]

    def run(self, sequences: list[Sequence]) -> None:
        """Runs all sequences to their last token."""
        while active := [one for one in sequences if not one.finished]:
            self.step(active)

    def step(self, active: list[Sequence]) -> None:
        """Runs one step over `active`."""
        slices, ids, positions, rows = [], [], [], []
        for one in active:
            count = min(self._chunk, len(one.tokens) - one.done)
            end = one.done + count
            while len(one.blocks) * self._runner.block_size < end:
                one.blocks.append(self._free.pop())
            slices.append(
                SequenceSlice(
                    query_start=len(ids),
                    query_length=count,
                    context_length=end,
                    block_table=tuple(one.blocks),
                    prompt_length=len(one.prompt),
                )
            )
            ids += one.tokens[one.done : end]
            positions += range(one.done, end)
            if end == len(one.tokens):
                rows.append(len(ids) - 1)
            one.done = end
        adapters = tuple(one.adapter for one in active)
        batch = StepBatch(
            token_ids=np.array(ids, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            slices=tuple(slices),
            logit_rows=np.array(rows, dtype=np.int64),
            adapters=adapters if any(adapters) else (),
        )
        logits = self._runner.run(batch)
        ready = [one for one in active if one.done == len(one.tokens)]
        for one, row in zip(ready, logits, strict=True):
            one.logits.append(row.clone())
            one.output.append(int(row.argmax()))


def check_same(
    found: list[Sequence], expected: list[Sequence], tolerance: float
) -> None:
    """The same tokens and logits, up to the first near tie of each sequence."""
    compared = 0
    for mine, theirs in zip(found, expected, strict=True):
        for step, (logits, reference) in enumerate(
            zip(mine.logits, theirs.logits, strict=True)
        ):
            difference = (logits - reference).abs().max().item()
            assert difference <= tolerance, f"logits of output {step}: {difference}"
            top = reference.topk(2).values
            if top[0] - top[1] < NEAR_TIE:
                break
            assert mine.output[step] == theirs.output[step], f"output {step}"
            compared += 1
    wanted = sum(one.max_tokens for one in expected)
    assert compared >= wanted // 2, "too many near ties to judge"
