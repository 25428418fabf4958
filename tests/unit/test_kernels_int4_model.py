"""A whole model over an INT4 store: near float32, and the same in any batch."""

from pathlib import Path

import pytest
import torch
from support.step_driver import Sequence, StepDriver
from support.tiny_models import save_tiny_model

from tokenmill.workers.engine.kv.store import KVKind, KVShape
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.runner import TransformersRunner

PROMPT = [5, 9, 200, 31, 7, 7, 64, 128, 3, 90, 11]


def runner_of(path: Path, kv: KVKind) -> TransformersRunner:
    return load_runner(
        path, weights="float32", kv=kv, block_size=8, num_blocks=64, threads=1
    )


def logits(path: Path, kv: KVKind) -> torch.Tensor:
    sequence = Sequence(PROMPT, 4)
    StepDriver(runner_of(path, kv), chunk=64).run([sequence])
    return torch.stack(sequence.logits[:1])


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_int4_stays_near_float32(variant: str, tmp_path: Path) -> None:
    path = save_tiny_model(variant, tmp_path)
    exact = logits(path, "float32")
    errors = {
        kind: float((logits(path, kind) - exact).norm() / exact.norm())
        for kind in ("int8", "int4")
    }
    assert 0 < errors["int8"] < errors["int4"] < 0.2


def test_a_sequence_does_not_see_its_batch(tmp_path: Path) -> None:
    runner = runner_of(save_tiny_model("llama", tmp_path), "int4")
    together = [Sequence(PROMPT[:length], 5) for length in (1, 7, 11)]
    StepDriver(runner, chunk=3).run(together)
    for sequence in together:
        alone = Sequence(sequence.prompt, 5)
        StepDriver(runner, chunk=512, seed=1).run([alone])
        assert alone.output == sequence.output


@pytest.mark.parametrize(("dim", "saved"), [(64, 0.41), (80, 0.40), (128, 0.39)])
def test_int4_takes_at_least_35_percent_less_than_int8(dim: int, saved: float) -> None:
    shape = KVShape(num_layers=2, num_kv_heads=3, head_dim=dim)
    share = 1 - shape.bytes_per_token("int4") / shape.bytes_per_token("int8")
    assert share == pytest.approx(saved, abs=0.006)
