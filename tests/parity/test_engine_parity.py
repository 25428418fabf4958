"""The whole engine in exact mode against `transformers.generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.generate_reference import NEAR_TIE, OUTPUT, prompts, references

from tokenmill.shared.messages import Sampling
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.request import EngineRequest


def run(path: Path, *, num_blocks: int) -> tuple[list[tuple[int, ...]], Engine]:
    """Sends all prompts at once through an engine with little room."""
    runner = load_runner(
        path, weights="float32", kv="float32", num_blocks=num_blocks, threads=1
    )
    table = TokenTable.from_directory(path)
    engine = Engine(runner, table, max_running=4, prefill_chunk=24)
    for index, prompt in enumerate(prompts()):
        engine.add(
            EngineRequest(
                id=str(index),
                token_ids=tuple(prompt),
                sampling=Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True),
                seed=index,
            )
        )
    outputs: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for finished in engine.step().finished:
            assert finished.error is None
            outputs[finished.request_id] = finished.choices[0].token_ids
    engine.check_integrity()
    return [outputs[str(index)] for index in range(len(prompts()))], engine


@pytest.mark.parametrize("variant", ["llama", "llama-dynamic", "gpt2", "mistral"])
def test_the_engine_gives_what_generate_gives(
    variant: str, tiny_model: Callable[[str], Path]
) -> None:
    path = tiny_model(variant)
    outputs, _ = run(path, num_blocks=24)  # not all fit: some wait, or are preempted
    for output, (ids, logits) in zip(outputs, references(path), strict=True):
        margins = logits.topk(2).values.diff().abs()[:, 0]
        ties = (margins < NEAR_TIE).nonzero()
        certain = int(ties[0]) if len(ties) else OUTPUT
        assert certain > 0
        assert list(output[:certain]) == ids[:certain]
        assert len(output) == OUTPUT
