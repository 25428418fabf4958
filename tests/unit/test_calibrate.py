"""Calibrating a tiny model: what is chosen, what it wins, what the text covers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.step_driver import Sequence, StepDriver
from support.tiny_models import save_tiny_model
from typer.testing import CliRunner

from tokenmill.__main__ import build_app
from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model.calibration import text as texts
from tokenmill.workers.engine.model.calibration.calibrate import calibrate
from tokenmill.workers.engine.model.calibration.search import most_sensitive
from tokenmill.workers.engine.model.load import load_runner

PROMPT = list(range(30, 90))


def uneven_model(directory: Path) -> Path:
    """A model some of whose inputs are much larger than the others."""
    path = save_tiny_model("llama", directory)
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith("layernorm.weight") or name == "model.norm.weight":
            weights[name][::12] *= 30
        elif name.endswith("down_proj.weight"):
            weights[name] *= 0.1
    save_file(weights, path / "model.safetensors")
    return path


def logits(path: Path, **settings: object) -> torch.Tensor:
    runner = load_runner(path, num_blocks=64, threads=1, **settings)  # type: ignore[arg-type]
    sequence = Sequence(PROMPT, 1)
    StepDriver(runner, chunk=512).run([sequence])
    return sequence.logits[0]


def quiet(_stage: str, _fraction: float) -> None:
    """Progress that nobody watches."""


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_calibration_lowers_the_error_of_int8(variant: str, tmp_path: Path) -> None:
    uneven = variant == "llama"
    path = uneven_model(tmp_path) if uneven else save_tiny_model(variant, tmp_path)
    generator = torch.Generator().manual_seed(1)
    samples = torch.randint(0, 256, (48, 24), generator=generator).tolist()
    made = calibrate(path, samples, "random bytes", quiet)
    assert (made.facts.samples, made.facts.tokens) == (48, 48 * 24)
    assert 0 < made.facts.loss_percent < made.facts.plain_loss_percent
    exact = logits(path, weights="float32", kv="float32")
    plain = (logits(path, kv="float32", calibration=None) - exact).norm()
    tested = (logits(path, kv="float32", calibration=made) - exact).norm()
    assert tested < plain * (0.6 if uneven else 1.0)
    both = (logits(path, calibration=made) - exact).norm() / exact.norm()
    assert both < 0.08


def test_a_family_of_another_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="gpt2"):
        calibrate(save_tiny_model("gpt2", tmp_path), [[1, 2]], "none", quiet)


def test_layers_are_sensitive_by_loss_for_their_size() -> None:
    losses = {f"layer {n}": 0.001 for n in range(38)} | {"small": 0.2, "head": 0.3}
    sizes = dict.fromkeys(losses, 10) | {"head": 500}
    assert most_sensitive(losses, sizes) == ("small",)


def test_samples_are_whole_and_spread_over_the_text(tmp_path: Path) -> None:
    tokenizer = texts.load_tokenizer(save_tiny_model("llama", tmp_path))
    passages = ["a" * 100, "b" * 7, "c" * 100]
    samples = texts.make_samples(tokenizer, passages, samples=4, length=20)
    assert [len(one) for one in samples] == [20] * 4
    assert {one[-1] for one in samples} == {ord("a"), ord("c")}


def test_the_shipped_text_gives_512_samples_and_names_its_sources(
    tmp_path: Path,
) -> None:
    tokenizer = texts.load_tokenizer(save_tiny_model("llama", tmp_path))
    passages = texts.read_texts(texts.SHIPPED_TEXT)
    assert len(texts.make_samples(tokenizer, passages, samples=512, length=64)) == 512
    for line in texts.SHIPPED_TEXT.read_text(encoding="utf-8").splitlines():
        assert json.loads(line)["source"].startswith("pep-")


def test_unseen_words_are_counted_with_repeats(tmp_path: Path) -> None:
    tokenizer = texts.load_tokenizer(save_tiny_model("llama", tmp_path))
    found = texts.coverage(tokenizer, ["red red green blue"], ["Red light", "GREEN"])
    assert (found.words, found.unseen_words) == (4, 1)
    assert found.examples == ("blue",)
    assert not found.covered


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "no JSON"), ('{"id": 1}', "has no text"), ("", "has no text")],
)
def test_a_line_without_text_is_named(
    content: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ModelLoadError, match=problem):
        texts.read_texts(file)


def test_the_command_reports_coverage_and_keeps_the_result(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "zyzzogeton " * 30}, {"messages": [{"content": "proposal"}]}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["calibrate", str(path), "--text", str(prompts), "--json"]
    arguments += ["--samples", "8", "--length", "16", "--on-text"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["unseen_share"] > 0.9
    assert "FP16" in facts["advice"]
    assert facts["calibration"]["text"] == "prompts.jsonl"
    assert Path(facts["file"]).parent == path
    runner = load_runner(path, num_blocks=8, threads=1)
    plain = load_runner(path, num_blocks=8, threads=1, calibration=None)
    assert runner.weights_version != plain.weights_version
