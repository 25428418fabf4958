"""What `transformers.generate` answers to a few prompts, each run alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

LENGTHS = (3, 70, 1, 33, 18, 101)
"""Prompt tokens, very different, in one batch; window and RoPE borders lie between."""
OUTPUT = 16
NEAR_TIE = 1e-3
"""Below this top-2 margin of the reference, either token is right."""


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, 256, (length,), generator=generator).tolist()
        for length in lengths
    ]


def references(
    path: Path, lengths: Sequence[int] = LENGTHS
) -> list[tuple[list[int], torch.Tensor]]:
    """Runs `generate` on each prompt alone.

    transformers' dynamic RoPE remembers the longest length it has met, so shorter
    prompts go first.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.eval()
    found = {tuple(p): generate(model, p) for p in sorted(prompts(lengths), key=len)}
    return [found[tuple(prompt)] for prompt in prompts(lengths)]


def generate(
    model: PreTrainedModel, prompt: list[int]
) -> tuple[list[int], torch.Tensor]:
    """Returns transformers' greedy output and the logits behind each token."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=OUTPUT,
        min_new_tokens=OUTPUT,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits)
