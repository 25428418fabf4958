"""`tokenmill inspect` refuses what a worker refuses, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from support.damaged_models import UP, WEIGHTS, edit_config, edit_tensors
from support.tiny_models import save_tiny_model

from tokenmill.shared.config import ModelConfig, WorkerConfig
from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model.inspection import Question, describe
from tokenmill.workers.engine.model.resolve import resolve_model
from tokenmill.workers.loading import load

CASES: list[tuple[str, Callable[[Path], object], str]] = [
    ("no tensor", lambda p: edit_tensors(p, **{UP: None}), "lacks 1 weight that"),
    (
        "no head",
        lambda p: edit_tensors(p, **{"lm_head.weight": None}),
        r"\(lm_head\.weight\)",
    ),
    (
        "shape",
        lambda p: edit_tensors(p, **{UP: torch.zeros(80, 47)}),
        r"has shape \[80, 47\]",
    ),
    (
        "more layers",
        lambda p: edit_config(p, num_hidden_layers=1),
        rf"{WEIGHTS}: tensor model\.layers\.1\.\S+ is of layer 1, .*1 layer;",
    ),
    ("no tokenizer", lambda p: (p / "tokenizer.json").unlink(), "no tokenizer in"),
    (
        "bad tokenizer",
        lambda p: (p / "tokenizer.json").write_text("{}"),
        "cannot read tokenizer",
    ),
    (
        "no KV heads",
        lambda p: edit_config(p, num_key_value_heads=0),
        r"config\.json .*num_key_value_heads is 0; expected a whole number from 1",
    ),
    (
        "heads",
        lambda p: edit_config(p, num_attention_heads=4, num_key_value_heads=3),
        "num_attention_heads 4 is no multiple of num_key_value_heads 3",
    ),
    (
        "no inner size",
        lambda p: edit_config(p, intermediate_size=-1),
        "intermediate_size is -1",
    ),
    (
        "rope",
        lambda p: edit_config(p, rope_parameters={"rope_type": "odd"}),
        "describes no llama model",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_inspect_and_worker_say_the_same(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    path = save_tiny_model("llama", tmp_path)
    damage(path)
    with pytest.raises(ModelLoadError, match=message) as inspected:
        describe(resolve_model("m", str(path)))
    settings = WorkerConfig(num_blocks=4, threads=1)
    with pytest.raises(ModelLoadError) as started:
        load("model", ModelConfig(name="m", path=str(path)), settings)
    assert str(started.value) == str(inspected.value)


def test_tensors_that_nobody_needs_are_a_warning(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    inner = "model.layers.0.self_attn.rotary_emb.inv_freq"  # of old checkpoints
    edit_tensors(path, **{"vision.patch": torch.zeros(3), inner: torch.zeros(4)})
    assert inner in load_file(path / WEIGHTS)
    with capture_logs() as logs:
        describe(path)
    (told,) = [entry for entry in logs if entry["event"] == "weights_unused"]
    assert told["log_level"] == "warning"
    assert (told["count"], told["names"]) == (1, ["vision.patch"])


@pytest.mark.parametrize("weights", ["int8-a8", "int8-bnb"])
def test_a_precision_of_gpus_is_refused_on_a_cpu(weights: str, tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    with pytest.raises(ModelLoadError, match=f"'{weights}' needs a GPU"):
        describe(path, Question(weights=weights))
    on_gpu = Question(weights=weights, device="cuda", memory_bytes=2**34)
    assert describe(path, on_gpu)["weights"] == weights
