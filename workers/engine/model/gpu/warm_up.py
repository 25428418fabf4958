"""Steps on scratch blocks at start: kernels compile before the first request comes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from .....shared.errors import ModelLoadError
from ...batch import SequenceSlice, StepBatch
from ...recovery import is_out_of_memory

if TYPE_CHECKING:
    from ..runner import TransformersRunner

log = structlog.get_logger("tokenmill.gpu")

_SHORT_PROMPTS: Final = (16, 32, 64)
"""Tokens: up to 64 rows the linear kernel is compiled for each power of two."""


def warm_up(
    runner: TransformersRunner,
    step_tokens: int,
    max_running: int,
    *,
    alone: bool = True,
) -> None:
    """Runs prefills, a mixed step and decodes that belong to no sequence.

    Where memory runs out the rest is left to the first requests, and the log says so. A
    rank of a group cannot leave a step: there it is an error.

    Args:
        runner: Its pool has a scratch block behind the blocks of sequences.
        step_tokens: Most tokens of a step.
        max_running: Most sequences of a step.
        alone: No other ranks meet this one in its steps.

    Raises:
        ModelLoadError: Memory ran out on a rank of a group.
    """
    began = time.monotonic()
    for lengths in _steps(runner, step_tokens, max_running):
        try:
            runner.rehearse(scratch_step(runner, lengths))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if not alone:
                raise ModelLoadError(
                    f"a step of {sum(lengths)} tokens ran out of memory ({error}); "
                    "lower worker.prefill_chunk, worker.max_running or "
                    "worker.kv_memory_mb, or raise models.tp"
                ) from error
            log.warning(
                "warm_up_ended", tokens=sum(lengths), reason="out of memory",
                instead="the first such step compiles what it needs",
            )  # fmt: skip
            runner.release_caches()
            return
    log.info("warmed_up", seconds=round(time.monotonic() - began, 1))


def _steps(
    runner: TransformersRunner, step_tokens: int, max_running: int
) -> Iterator[list[int]]:
    """Yields the tokens of each sequence of each step."""
    pool = runner.num_blocks * runner.block_size
    longest = min(max(1, step_tokens - max_running), runner.max_context, pool)
    yield from ([size] for size in _SHORT_PROMPTS if size < longest)
    yield [longest]
    yield [longest, *[1] * max(1, max_running - 1)]
    yield [1]
    yield [1] * max_running


def scratch_step(runner: TransformersRunner, lengths: list[int]) -> StepBatch:
    """Returns a step of new sequences whose every block is the scratch block.

    Args:
        runner: Gives the block.
        lengths: Tokens of each sequence.
    """
    starts = np.cumsum([0, *lengths])
    slices = tuple(
        SequenceSlice(
            int(start),
            length,
            length,
            (runner.num_blocks,) * -(-length // runner.block_size),
        )
        for start, length in zip(starts, lengths, strict=False)
    )
    return StepBatch(
        np.zeros(starts[-1], np.int64),
        np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        slices,
        starts[1:] - 1,
    )
