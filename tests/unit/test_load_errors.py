"""Loading refuses what it cannot serve, and says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model.families import FAMILIES
from tokenmill.workers.engine.model.load import load_runner


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny llama of its own, to be damaged."""
    return save_tiny_model("llama", tmp_path)


def edit_config(path: Path, **changes: object) -> None:
    """Changes keys of config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def test_an_unsupported_architecture_lists_the_supported(model: Path) -> None:
    edit_config(model, model_type="mamba")
    with pytest.raises(ModelLoadError) as caught:
        load_runner(model, num_blocks=4)
    for family in FAMILIES:
        assert family in str(caught.value)
    assert "'mamba'" in str(caught.value)


def test_a_quantized_checkpoint_is_refused(model: Path) -> None:
    edit_config(model, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelLoadError, match="quantized already"):
        load_runner(model, num_blocks=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "x"},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_attention_heads": 5, "num_key_value_heads": 2},
        {"num_hidden_layers": -1},
        {"max_position_embeddings": None},
        {"vocab_size": 2.5},
        {"hidden_size": 50, "head_dim": None},
        {"rope_parameters": {"rope_type": "nothing"}},
        {"hidden_act": "nothing"},
    ],
    ids=str,
)
def test_values_that_no_model_has_are_a_load_error(
    model: Path, changes: dict[str, object]
) -> None:
    edit_config(model, **changes)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_runner(model, num_blocks=4)


def test_a_numbered_file_that_is_missing_is_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00003.safetensors")
    with pytest.raises(ModelLoadError, match="lacks file 2, 3 of the 3"):
        load_runner(model, num_blocks=4)


def test_broken_json_names_the_file(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        load_runner(model, num_blocks=4)


def test_a_missing_weight_is_named(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights.*layers\.1\.mlp\.up"):
        load_runner(model, num_blocks=4)


def test_a_wrong_shape_names_both_shapes(model: Path) -> None:
    edit_config(model, intermediate_size=96)
    with pytest.raises(ModelLoadError, match=r"80.*config\.json calls for.*96"):
        load_runner(model, num_blocks=4)


def test_a_truncated_file_is_damaged(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match="damaged"):
        load_runner(model, num_blocks=4)


def test_a_missing_shard_is_named(model: Path) -> None:
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="lacks model-00001-of-00002"):
        load_runner(model, num_blocks=4)


def test_weights_that_are_not_finite_are_refused(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=r"NaN or infinity.*q_proj\)"):
        load_runner(model, num_blocks=4)


def test_an_unknown_device_is_refused(model: Path) -> None:
    with pytest.raises(ModelLoadError, match="'tpu'"):
        load_runner(model, num_blocks=4, device="tpu")


def test_a_pool_without_room_for_a_block_says_so(model: Path) -> None:
    with pytest.raises(ModelLoadError, match="no KV block"):
        load_runner(model, kv_memory_mb=0)
