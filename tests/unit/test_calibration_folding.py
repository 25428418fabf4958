"""Folding scales into weights changes nothing in float, and helps what is quantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.calibrations import random_calibration
from support.step_driver import Sequence, StepDriver
from support.tiny_models import save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.kernels import ops as host_ops
from tokenmill.workers.engine.model.calibration.folding import powers_of_two
from tokenmill.workers.engine.model.calibration.result import (
    Calibration,
)
from tokenmill.workers.engine.model.device import Target
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.runner import TransformersRunner

PROMPT = list(range(30, 60))
LAYERS = 2


def logits(path: Path, **settings: object) -> torch.Tensor:
    """Returns the logits behind the first output token."""
    return _first(load_runner(path, num_blocks=64, threads=1, **settings))  # type: ignore[arg-type]


def _first(runner: TransformersRunner, chunk: int = 512) -> torch.Tensor:
    sequence = Sequence(PROMPT, 1)
    StepDriver(runner, chunk=chunk).run([sequence])
    return sequence.logits[0]


def error(exact: torch.Tensor, tested: torch.Tensor) -> float:
    return ((tested - exact).norm() / exact.norm()).item()


VARIANTS = ["llama", "llama-tied", "llama-gelu", "mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fused", [True, False])
def test_folded_scales_are_exact_in_float(
    variant: str, fused: bool, tmp_path: Path
) -> None:
    path = save_tiny_model(variant, tmp_path)
    settings = {"weights": "float32", "kv": "float32", "fused": fused}
    calibration = random_calibration(path)
    plain = logits(path, **settings, calibration=None)
    folded = logits(path, **settings, calibration=calibration)
    assert not torch.equal(plain, folded)
    torch.testing.assert_close(folded, plain, atol=1e-4, rtol=1e-4)


def test_scales_that_do_not_fit_would_be_seen(tmp_path: Path) -> None:
    """The test above must fail if one side of a fold were lost."""
    path = save_tiny_model("llama", tmp_path)
    weights = load_file(path / "model.safetensors")
    plain = logits(path, weights="float32", kv="float32")
    name = "model.layers.1.self_attn.o_proj.weight"
    weights[name] = (
        weights[name]
        * random_calibration(path)
        .tensors["layers.1.value_scale"]
        .repeat_interleave(3, 0)
        .ravel()
    )
    save_file(weights, path / "model.safetensors")
    changed = logits(path, weights="float32", kv="float32")
    assert (changed - plain).abs().max() > 1e-2


@pytest.mark.parametrize("variant", ["qwen2", "qwen3"])
def test_large_key_channels_do_not_hurt_int8_keys(variant: str, tmp_path: Path) -> None:
    """Qwen2's key biases: two channels of each head are always large."""
    path = save_tiny_model(variant, tmp_path)
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith("k_proj.bias"):
            weights[name].view(2, 8)[:, 3] += 60
            weights[name].view(2, 8)[:, 7] -= 40
        if name.endswith("k_norm.weight"):
            weights[name][3] *= 50
    save_file(weights, path / "model.safetensors")
    exact = logits(path, weights="float32", kv="float32")
    plain = error(exact, logits(path, weights="float32", kv="int8", calibration=None))
    smooth = error(exact, logits(path, weights="float32", kv="int8"))
    assert smooth < plain / 2
    assert smooth < 0.1


def test_a_second_plane_makes_weights_practically_exact(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    names = ["lm_head"]
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        names += [f"{layer}.self_attn.{part}_proj" for part in ("qkv", "o")]
        names += [f"{layer}.mlp.{part}_proj" for part in ("gate_up", "down")]
    exact = logits(path, weights="float32", kv="float32")
    one = error(exact, logits(path, kv="float32", calibration=None))
    both = error(
        exact, logits(path, kv="float32", calibration=random_calibration(path, *names))
    )
    assert both < one / 20


def test_logits_with_planes_and_bias_do_not_depend_on_batch_or_chunk(
    tmp_path: Path,
) -> None:
    path = save_tiny_model("llama", tmp_path)
    calibration = random_calibration(path, "model.layers.1.mlp.down_proj", "lm_head")
    runner = load_runner(path, num_blocks=64, threads=1, calibration=calibration)
    prompts = [[(7 * n) % 251 for n in range(length)] for length in (1, 37, 18, 90)]
    together = [Sequence(prompt, 4) for prompt in prompts]
    StepDriver(runner, chunk=13).run(together)
    for sequence in together:
        alone = Sequence(sequence.prompt, 4)
        StepDriver(runner, chunk=512, seed=1).run([alone])
        assert alone.output == sequence.output
        for here, there in zip(alone.logits, sequence.logits, strict=True):
            assert torch.equal(here, there)


def test_fused_and_unfused_layers_agree_with_planes(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    calibration = random_calibration(path, "model.layers.0.self_attn.qkv_proj")
    # A float store: next to a tie, both round the same key to different INT8 values.
    fused = logits(path, kv="float32", calibration=calibration)
    modules = logits(path, kv="float32", calibration=calibration, fused=False)
    # Norms differ in the last bit, which moves some INT16 activations by one step; a
    # plane that one of them lacks would be a hundred times that.
    assert error(fused, modules) < 2e-3


def test_a_calibration_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    made = random_calibration(path)
    short = dict(made.tensors) | {"layers.0.key_scale": torch.ones(2, 3)}
    with pytest.raises(ModelLoadError, match=r"layers\.0\.key_scale"):
        logits(path, calibration=Calibration(made.facts, short))


def test_the_weights_version_names_the_calibration(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    versions = {
        load_runner(path, num_blocks=8, calibration=choice).weights_version
        for choice in (None, "auto", random_calibration(path))
    }
    assert len(versions) == 3


def test_in_half_precision_scales_are_powers_of_two(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    scales = random_calibration(path).tensors
    rounded = powers_of_two(scales)
    for name, values in rounded.items():
        if name.endswith("_mean"):
            assert torch.equal(values, scales[name])
            continue
        assert bool((torch.frexp(values).mantissa == 0.5).all())
        assert float((values / scales[name]).log2().abs().max()) <= 0.501


def test_folding_into_half_precision_rounds_nothing(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    norms, calibrated = {}, random_calibration(path)
    for calibration in (None, calibrated):
        runner = load_runner(
            path,
            weights="int8",
            num_blocks=64,
            threads=1,
            device=Target(torch.device("cpu"), host_ops, torch.bfloat16),
            calibration=calibration,
        )
        layer = runner.model.base_model.layers[0]
        norms[calibration is None] = layer.input_layernorm.weight.detach().float()
        version = runner.weights_version
    ratio = norms[True] / norms[False]
    assert bool((torch.frexp(ratio).mantissa == 0.5).all())
    assert not torch.equal(*norms.values())
    exact = load_runner(
        path,
        weights="int8",
        num_blocks=64,
        threads=1,
        calibration=calibrated,
        device="cpu",
    )
    assert exact.weights_version == version  # a job may move between the two


def test_a_filled_layer_keeps_nothing_that_only_its_bias_was_made_of(
    tmp_path: Path,
) -> None:
    path = save_tiny_model("qwen2", tmp_path)
    runner = load_runner(
        path,
        num_blocks=64,
        threads=1,
        calibration=random_calibration(path),
        device="cpu",
    )
    attention = runner.model.base_model.layers[0].self_attn
    assert attention.qkv_proj.bias is not None
    for layer in (attention.qkv_proj, attention.o_proj):
        parts = (layer._mean, layer._own_bias, layer._correction)
        assert parts == (None, None, None)
