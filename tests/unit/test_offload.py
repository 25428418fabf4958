"""Layers that stay in host memory: which, and that results do not change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.step_driver import Sequence, StepDriver
from support.tiny_models import save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model.gpu.bnb_linear import BitsAndBytesNf4Linear
from tokenmill.workers.engine.model.gpu.device_linear import Place
from tokenmill.workers.engine.model.gpu.offload import (
    Homes,
    module_bytes,
    resident_layers,
)
from tokenmill.workers.engine.model.load import load_runner

PROMPT = list(range(30, 60))
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("room", "expected"),
    [(40, 4), (39, 2), (30, 2), (29, 1), (10, 0), (0, 0)],
)
def test_a_layer_that_does_not_fit_leaves_room_for_a_visit(
    room: int, expected: int
) -> None:
    assert resident_layers([10, 10, 10, 10], room) == expected


def test_the_last_layers_stay_in_host_memory() -> None:
    homes = Homes(CUDA, "model.layers", 12, 10, "int8")
    assert homes("model.layers.9.mlp.up_proj") == CUDA
    assert homes("model.layers.10.mlp.up_proj.weight") == torch.device("cpu")
    assert homes("model.layers.1.mlp.up_proj.weight") == CUDA
    assert homes("lm_head") == CUDA


@pytest.mark.parametrize("weights", ["nf4", "int8-bnb"])
def test_a_precision_that_cannot_be_split_says_so(weights: str) -> None:
    Homes(CUDA, "model.layers", 12, 12, weights)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=f"2 of 12 layers.*{weights}"):
        Homes(CUDA, "model.layers", 12, 10, weights)  # type: ignore[arg-type]


def test_int8_weights_count_a_byte_each_and_a_scale_a_row() -> None:
    with torch.device("meta"):
        layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16))
    assert module_bytes(layer, "float16", torch.float16) == 2 * (128 + 16 + 32)
    for weights in ("int8", "int8-a8", "int8-bnb"):
        counted = module_bytes(layer, weights, torch.float16)  # type: ignore[arg-type]
        assert counted == 128 + 4 * 16 + 2 * (16 + 32)


def test_nf4_weights_count_what_bitsandbytes_takes_for_them() -> None:
    with torch.device("meta"):
        layer = torch.nn.Linear(4096, 1024, bias=False)
    filled = BitsAndBytesNf4Linear(4096, 1024, Place(CPU, CPU, torch.float32))
    filled.fill(torch.randn(1024, 4096))
    assert filled.inner is not None
    weight = filled.inner.weight
    state = weight.quant_state
    taken = weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert module_bytes(layer, "nf4", torch.bfloat16) == pytest.approx(taken, rel=0.01)


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_offloaded_layers_give_the_same_logits(variant: str, tmp_path: Path) -> None:
    path = save_tiny_model(variant, tmp_path)
    found = []
    for offloaded in (0, 2):
        runner = load_runner(
            path,
            weights="float32",
            kv="float32",
            num_blocks=16,
            threads=1,
            device="cpu",
            fused=False,
            offload_layers=offloaded,
        )
        sequence = Sequence(PROMPT, 3)
        StepDriver(runner, chunk=16).run([sequence])
        found.append(torch.stack(sequence.logits))
        at_rest = {weight.device.type for weight in runner.model.parameters()}
        assert ("meta" in at_rest) == bool(offloaded)
    assert torch.equal(*found)
