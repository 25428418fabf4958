"""What `quality.py` measures of one loaded model: losses, greedy tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.workers.engine.batch import SequenceSlice, StepBatch

if TYPE_CHECKING:
    from tokenmill.workers.engine.model.runner import TransformersRunner

CHUNK = 256
"""Tokens a step; the engine's chunk borders do not change results."""
BLOCK_SIZE = 8
T_95 = 1.96
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 64
"""Of each free-running output."""


@dataclass
class Measured:
    """One precision on some windows of text."""

    losses: np.ndarray
    """float64 [windows, tokens - 1]: negative log likelihoods."""
    best: np.ndarray
    """int32 [windows, tokens]: the likeliest next token at each position."""
    outputs: np.ndarray
    """int64 [prompts, OUTPUT_TOKENS]: free-running greedy output."""

    def head(self, windows: int) -> Measured:
        """Returns the same of the first windows alone."""
        return Measured(
            self.losses[:windows], self.best[:windows], self.outputs[:windows]
        )

    def save(self, file: Path) -> None:
        """Keeps it for a later run."""
        np.savez(file, losses=self.losses, best=self.best, outputs=self.outputs)

    @staticmethod
    def load(file: Path) -> Measured:
        """Reads what `save` kept."""
        with np.load(file) as kept:
            return Measured(kept["losses"], kept["best"], kept["outputs"])


def measure(
    runner: TransformersRunner, windows: list[list[int]], prompts: int
) -> Measured:
    """Runs a model over windows of text, then lets it write.

    Args:
        runner: The loaded model.
        windows: Token ids, all of one length.
        prompts: Windows whose first tokens are prompts for free-running output.
    """
    pairs = [_window(runner, window) for window in windows]
    starts = [window[:PROMPT_TOKENS] for window in windows[:prompts]]
    return Measured(
        np.stack([losses for losses, _ in pairs]),
        np.stack([best for _, best in pairs]),
        np.array([_greedy(runner, start) for start in starts]),
    )


def _steps(window: list[int]) -> Iterator[StepBatch]:
    """Yields the prefill steps of one window, logits wanted for every row."""
    for start in range(0, len(window), CHUNK):
        part = window[start : start + CHUNK]
        yield _step(part, start, np.arange(len(part), dtype=np.int64))


def _step(part: list[int], start: int, rows: np.ndarray) -> StepBatch:
    end = start + len(part)
    blocks = tuple(range(-(-end // BLOCK_SIZE)))
    return StepBatch(
        token_ids=np.array(part, dtype=np.int64),
        positions=np.arange(start, end, dtype=np.int64),
        slices=(SequenceSlice(0, len(part), end, blocks),),
        logit_rows=rows,
    )


def _window(
    runner: TransformersRunner, window: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    targets = torch.tensor(window[1:])
    losses, best = [], []
    done = 0
    for step in _steps(window):
        logits = runner.run(step)
        best.append(logits.argmax(dim=-1).int().numpy())
        wanted = targets[done : done + len(logits)]
        rows = logits[: len(wanted)]
        chosen = rows.gather(1, wanted[:, None])[:, 0]
        losses.append((torch.logsumexp(rows, dim=-1) - chosen).double().numpy())
        done += len(wanted)
    return np.concatenate(losses), np.concatenate(best)


def _greedy(runner: TransformersRunner, prompt: list[int]) -> list[int]:
    """Returns the greedy continuation of a prompt."""
    tokens, part = list(prompt), list(prompt)
    for _ in range(OUTPUT_TOKENS):
        start = len(tokens) - len(part)
        last = np.array([len(part) - 1], dtype=np.int64)
        logits = runner.run(_step(part, start, last))
        part = [int(logits[0].argmax())]
        tokens += part
    return tokens[len(prompt) :]


def compare(exact: Measured, tested: Measured) -> dict[str, float]:
    """Returns perplexities, their paired change with its interval, and agreement.

    Args:
        exact: Float32 on the same windows.
        tested: The precision in question.
    """
    differences = (tested.losses - exact.losses).mean(axis=1)
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    same = tested.outputs == exact.outputs
    before_first = np.cumprod(same, axis=1)
    return {
        "perplexity_float32": math.exp(float(exact.losses.mean())),
        "perplexity": math.exp(float(tested.losses.mean())),
        "change_percent": 100 * math.expm1(mean),
        "low_95_percent": 100 * math.expm1(mean - T_95 * error),
        "high_95_percent": 100 * math.expm1(mean + T_95 * error),
        "greedy_agreement": float((tested.best == exact.best).mean()),
        "free_running_agreement": float(before_first.mean()),
    }
