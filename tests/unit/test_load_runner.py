"""A loaded runner: precisions, shards, invariance, the figures it reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.step_driver import Sequence, StepDriver
from support.tiny_models import EOS, VOCABULARY, save_tiny_model

from tokenmill.workers.engine.model.identity import weights_version
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.quantize import Nf4Linear
from tokenmill.workers.engine.model.runner import TransformersRunner

PROMPT = list(range(30, 60))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("models"))


def first_logits(
    runner: TransformersRunner, prompt: list[int], *, chunk: int = 512
) -> torch.Tensor:
    """Returns the logits behind the first output token, float32 [vocabulary]."""
    sequence = Sequence(prompt, 1)
    StepDriver(runner, chunk=chunk).run([sequence])
    return sequence.logits[0]


def small(path: Path, **settings: object) -> TransformersRunner:
    """Loads with a small pool."""
    return load_runner(path, num_blocks=64, threads=1, **settings)  # type: ignore[arg-type]


def test_what_it_reports(llama: Path) -> None:
    runner = small(llama, block_size=16, max_context=100)
    assert runner.vocab_size == VOCABULARY
    assert runner.eos_token_ids == {EOS}
    assert (runner.block_size, runner.num_blocks) == (16, 64)
    assert runner.max_context == 100


def test_a_larger_cap_keeps_the_models_own_context(llama: Path) -> None:
    assert small(llama, max_context=10_000).max_context == 256


def test_generation_config_goes_before_config(llama: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(llama, tmp_path / "copy"))
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert small(path).eos_token_ids == {3, 5}


@pytest.mark.parametrize(
    ("weights", "kv", "tolerance"),
    [
        ("float32", "int8", 0.05),
        ("int8", "float32", 0.05),
        ("int8", "int8", 0.08),
        ("bfloat16", "float32", 0.08),
        ("nf4", "float32", 0.6),
    ],
)
def test_each_precision_stays_near_float32(
    llama: Path, weights: str, kv: str, tolerance: float
) -> None:
    exact = first_logits(small(llama, weights="float32", kv="float32"), PROMPT)
    tested = first_logits(small(llama, weights=weights, kv=kv), PROMPT)
    error = ((tested - exact).norm() / exact.norm()).item()
    assert 0 < error < tolerance


@pytest.mark.parametrize("variant", ["gpt2", "falcon-multi-query", "glm4"])
def test_every_kind_of_linear_layer_is_quantized(variant: str, tmp_path: Path) -> None:
    path = save_tiny_model(variant, tmp_path)
    exact = first_logits(small(path, weights="float32", kv="float32"), PROMPT)
    tested = first_logits(small(path), PROMPT)
    assert 0 < ((tested - exact).norm() / exact.norm()).item() < 0.08
    assert bool(torch.isfinite(first_logits(small(path, weights="nf4"), PROMPT)).all())


@pytest.mark.parametrize(
    "variant", ["llama", "llama-gelu", "gpt2", "falcon-grouped", "glm4"]
)
def test_int8_logits_do_not_depend_on_batch_or_chunk(
    variant: str, tmp_path: Path
) -> None:
    runner = small(save_tiny_model(variant, tmp_path))
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(0, 256, (length,), generator=generator).tolist()
        for length in (1, 37, 18, 5, 90)
    ]
    together = [Sequence(prompt, 6) for prompt in prompts]
    StepDriver(runner, chunk=13).run(together)
    for sequence in together:
        alone = Sequence(sequence.prompt, 6)
        StepDriver(runner, chunk=512, seed=1).run([alone])
        assert alone.output == sequence.output
        for here, there in zip(alone.logits, sequence.logits, strict=True):
            assert torch.equal(here, there)


def test_a_four_bit_layer_multiplies_its_own_dequantized_weight() -> None:
    import bitsandbytes.functional as bnb

    layer = Nf4Linear(64, 48)
    weight, x = torch.randn(48, 64), torch.randn(5, 64)
    layer.fill(weight)
    layer.fill_bias(torch.arange(48.0))
    assert layer.inner is not None
    stored = layer.inner.weight
    assert stored.quant_state.nested  # double quantization
    kept = bnb.dequantize_4bit(stored.data, stored.quant_state).float()
    assert 0 < (kept - weight).abs().mean() < 0.15
    expected = x @ kept.T + torch.arange(48.0)
    assert torch.allclose(layer(x), expected, atol=1e-3)


@pytest.mark.parametrize("variant", ["llama-tied", "mistral", "qwen2", "qwen3"])
def test_the_fused_decoder_agrees_with_the_modules(
    variant: str, tmp_path: Path
) -> None:
    path = save_tiny_model(variant, tmp_path)
    fused = first_logits(small(path, kv="float32", fused=True), PROMPT)
    modules = first_logits(small(path, kv="float32", fused=False), PROMPT)
    assert torch.allclose(fused, modules, atol=2e-3)


def test_an_output_depends_on_nothing_but_its_own_sequence(llama: Path) -> None:
    """The served configuration: the same bits alone, in a batch, and in chunks."""
    runner = small(llama)
    prompts = [PROMPT, PROMPT[:3], PROMPT[5:25], [7]]

    def run(chunk: int, members: list[list[int]], seed: int) -> list[Sequence]:
        sequences = [Sequence(prompt, 6) for prompt in members]
        StepDriver(runner, chunk=chunk, seed=seed).run(sequences)
        return sequences

    together = run(512, prompts, 0)
    chunked = run(4, prompts, 1)
    for index, prompt in enumerate(prompts):
        (alone,) = run(512, [prompt], 2)
        for other in (together[index], chunked[index]):
            assert other.output == alone.output
            assert torch.equal(torch.stack(other.logits), torch.stack(alone.logits))


def test_a_step_that_wants_no_logits_gives_none(llama: Path) -> None:
    runner = small(llama)
    whole = first_logits(runner, PROMPT)
    assert torch.equal(first_logits(runner, PROMPT, chunk=7), whole)


def test_rows_are_counted_where_they_are_multiplied(llama: Path) -> None:
    for settings in ({}, {"fused": False}, {"weights": "float32"}):
        runner = small(llama, **settings)
        StepDriver(runner, chunk=8).run([Sequence(PROMPT, 4), Sequence([1, 2], 4)])
        assert runner.gemm_rows == (len(PROMPT) + 3) + (2 + 3)


def test_shards_and_prefixes_load_like_a_single_file(
    llama: Path, tmp_path: Path
) -> None:
    tensors = load_file(llama / "model.safetensors")
    path = tmp_path / "sharded"
    path.mkdir()
    shutil.copy(llama / "config.json", path)
    half = len(tensors) // 2
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:half], names[half:])):
        file = f"model-{number}.safetensors"
        # Checkpoints of the bare base model leave its prefix out.
        stripped = {n: n.removeprefix("model.") for n in part}
        save_file({stripped[n]: tensors[n] for n in part}, path / file)
        weight_map.update(dict.fromkeys(stripped.values(), file))
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    assert torch.equal(
        first_logits(small(path), PROMPT), first_logits(small(llama), PROMPT)
    )


def test_half_precision_checkpoints_load(llama: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(llama, tmp_path / "half"))
    tensors = load_file(path / "model.safetensors")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(halves, path / "model.safetensors")
    exact = first_logits(small(llama, weights="float32"), PROMPT)
    tested = first_logits(small(path, weights="float32"), PROMPT)
    assert ((tested - exact).norm() / exact.norm()).item() < 0.05


def test_a_tied_head_that_is_widened_keeps_no_second_copy(tmp_path: Path) -> None:
    path = save_tiny_model("llama-tied", tmp_path)
    file = path / "model.safetensors"
    halves = {name: value.bfloat16() for name, value in load_file(file).items()}
    save_file(halves, file, {"format": "pt"})
    model = small(path, weights="float32").model
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    assert embedding.dtype == torch.float32
    assert torch.equal(embedding, halves["model.embed_tokens.weight"].float())
    assert head.data_ptr() == embedding.data_ptr()


def test_progress_ends_at_one(llama: Path) -> None:
    seen: list[tuple[str, float]] = []
    small(llama, progress=lambda stage, part: seen.append((stage, part)))
    assert seen[-1] == ("loading weights", 1.0)


def test_versions_tell_weights_and_precisions_apart(
    llama: Path, tmp_path: Path
) -> None:
    other = save_tiny_model("llama", tmp_path, seed=1)
    versions = {
        weights_version(llama, "int8", "int8"),
        weights_version(llama, "float32", "int8"),
        weights_version(other, "int8", "int8"),
    }
    assert len(versions) == 3
    assert weights_version(llama, "int8", "int8") in versions
