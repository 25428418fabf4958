"""Exact mode against `transformers.generate`: same tokens, logits within 1e-4."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.generate_reference import LENGTHS, NEAR_TIE, OUTPUT, prompts, references
from support.step_driver import Sequence, StepDriver
from support.tiny_models import VARIANTS

from tokenmill.workers.engine.model.families import FAMILIES
from tokenmill.workers.engine.model.load import load_runner

TOLERANCE = 1e-4


def compare(sequence: Sequence, ids: list[int], logits: torch.Tensor) -> int:
    """Checks one sequence; returns how many tokens were compared."""
    for step, (mine, theirs) in enumerate(zip(sequence.logits, logits, strict=True)):
        difference = (mine - theirs).abs().max().item()
        assert difference <= TOLERANCE, f"logits of output {step} differ: {difference}"
        top = theirs.topk(2).values
        if top[0] - top[1] < NEAR_TIE:
            return step
        assert sequence.output[step] == ids[step], f"output {step}"
    return len(ids)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_batched_and_chunked_gives_what_generate_gives(
    variant: str, tiny_model: Callable[[str], Path]
) -> None:
    path = tiny_model(variant)
    expected = references(path)
    fused = (True, False) if FAMILIES[VARIANTS[variant][0]].llama_pattern else (False,)
    for use_fused in fused:
        runner = load_runner(
            path,
            weights="float32",
            kv="float32",
            num_blocks=128,
            fused=use_fused,
            threads=1,
        )
        for chunk in (16, 512):
            sequences = [Sequence(prompt, OUTPUT) for prompt in prompts()]
            StepDriver(runner, chunk=chunk).run(sequences)
            compared = sum(
                compare(sequence, *answer)
                for sequence, answer in zip(sequences, expected, strict=True)
            )
            assert compared >= len(LENGTHS) * OUTPUT // 2, "too many near ties to judge"


@pytest.mark.parametrize(
    "variant", ["falcon-alibi", "falcon-alibi-multi-query", "llama-dynamic-far"]
)
def test_far_positions_give_what_generate_gives(
    variant: str, tiny_model: Callable[[str], Path]
) -> None:
    """Where a bias or an angle rounded otherwise than in transformers adds up."""
    path = tiny_model(variant)
    lengths = (420, 1, 257)
    runner = load_runner(
        path, weights="float32", kv="float32", num_blocks=128, threads=1
    )
    sequences = [Sequence(prompt, OUTPUT) for prompt in prompts(lengths)]
    StepDriver(runner, chunk=48).run(sequences)
    compared = sum(
        compare(sequence, *answer)
        for sequence, answer in zip(sequences, references(path, lengths), strict=True)
    )
    assert compared >= len(lengths) * OUTPUT // 2, "too many near ties to judge"
