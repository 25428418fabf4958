"""Loading refuses what it cannot serve, and says which file and tensor is at fault."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from support.damaged_models import UP, WEIGHTS, edit_config, edit_tensors
from support.tiny_models import save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model.families import FAMILIES
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.quantize import Weights
from tokenmill.workers.engine.model.resolve import resolve_model
from tokenmill.workers.engine.model.runner import TransformersRunner

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny llama of its own, to be damaged."""
    return save_tiny_model("llama", tmp_path)


def load(path: Path) -> TransformersRunner:
    """Goes the way of a worker: finds the files, then loads them."""
    return load_runner(resolve_model("any", str(path)), num_blocks=4)


def in_two_files(path: Path) -> None:
    """Splits the weights into two files with an index."""
    tensors = load_file(path / WEIGHTS)
    names = sorted(tensors)
    places = {name: f"{'ab'[name > UP]}.safetensors" for name in names}
    for file in ("a.safetensors", "b.safetensors"):
        part = {name: tensors[name] for name in names if places[name] == file}
        save_file(part, path / file)
    (path / WEIGHTS).unlink()
    (path / INDEX).write_text(json.dumps({"weight_map": places}))


def edit_index(path: Path, **changes: str) -> None:
    """Splits the weights, then changes entries of the index."""
    in_two_files(path)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"].update(changes)
    (path / INDEX).write_text(json.dumps(index))


def name_twice(path: Path) -> None:
    """Lets a header name the same tensor twice."""
    data = (path / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    entry = json.dumps(json.loads(header)[UP])
    header = header.rstrip()[:-1] + f',"{UP}":{entry}}}'.encode()
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + rest)


def in_a_second_file(path: Path) -> None:
    """Leaves weights of another checkpoint beside the right ones, without an index."""
    in_two_files(path)
    (path / INDEX).unlink()
    save_file({UP: torch.zeros(80, 48)}, path / "c.safetensors")


def only_pickles(path: Path) -> None:
    """Leaves weights as a pickle alone."""
    torch.save(load_file(path / WEIGHTS), path / "pytorch_model.bin")
    (path / WEIGHTS).unlink()


def cut(path: Path) -> None:
    """Takes the end off the weights."""
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[:-1000])


def cut_second(path: Path) -> None:
    """Takes the end off the second of two files."""
    in_two_files(path)
    data = (path / "b.safetensors").read_bytes()
    (path / "b.safetensors").write_bytes(data[:-10])


def foreign_code(path: Path) -> None:
    """Makes it a checkpoint that brings its own architecture."""
    edit_config(path, model_type="mine", auto_map={"AutoModel": "mine.Mine"})
    (path / "mine.py").write_text("raise SystemExit('this ran')")


def save_biased(path: Path, bias: torch.Tensor) -> None:
    """Lets the model call for biases and gives one of them."""
    edit_config(path, attention_bias=True)
    edit_tensors(path, **{"model.layers.0.self_attn.q_proj.bias": bias})


# What is wrong, how it comes about, and what the message must name.
CASES: list[tuple[str, Callable[[Path], object], str]] = [
    ("no config", lambda p: (p / "config.json").unlink(), r"llama has no config\.json"),
    ("no weights", lambda p: (p / WEIGHTS).unlink(), r"llama has no \*\.safetensors"),
    ("pickles", only_pickles, r"it has pytorch_model\.bin.*never read"),
    ("empty file", lambda p: (p / WEIGHTS).write_bytes(b""), rf"{WEIGHTS} is not a"),
    ("cut short", cut, rf"{WEIGHTS} is not a whole.*in tensor model\.layers\.1\.\S+"),
    ("second cut", cut_second, r"b\.safetensors is not a whole.*in tensor model\."),
    (
        "missing tensor",
        lambda p: edit_tensors(p, **{UP: None}),
        rf"{WEIGHTS} lacks 1 weight that.*{UP}",
    ),
    (
        "other shape",
        lambda p: edit_tensors(p, **{UP: torch.zeros(80, 47)}),
        rf"{WEIGHTS}: weight {UP} has shape \[80, 47\].*\[80, 48\]",
    ),
    (
        "a vector for a matrix",
        lambda p: edit_tensors(p, **{UP: torch.zeros(80 * 48)}),
        rf"{WEIGHTS}: weight {UP} has shape \[3840\]",
    ),
    (
        "norm of another size",
        lambda p: edit_tensors(p, **{"model.norm.weight": torch.zeros(47)}),
        rf"{WEIGHTS}: weight model\.norm\.weight has shape \[47\].*\[48\]",
    ),
    (
        "integers",
        lambda p: edit_tensors(p, **{UP: torch.zeros(80, 48, dtype=torch.int8)}),
        rf"{WEIGHTS}: tensor {UP} is of type I8; expected",
    ),
    (
        "eight-bit floats",
        lambda p: edit_tensors(p, **{UP: torch.zeros(80, 48).to(torch.float8_e4m3fn)}),
        rf"{WEIGHTS}: tensor {UP} is of type F8_E4M3",
    ),
    ("named twice", name_twice, rf"{WEIGHTS} is not.*names {UP} twice"),
    (
        "in two files",
        in_a_second_file,
        rf"{UP} is in .*a\.safetensors and again in .*c\.safetensors",
    ),
    (
        "under two names",
        lambda p: edit_tensors(p, **{UP.removeprefix("model."): torch.zeros(80, 48)}),
        rf"{WEIGHTS}: tensors \S+up_proj\.weight and \S+ are both {UP}",
    ),
    (
        "a bias of another size",
        lambda p: save_biased(p, torch.zeros(47)),
        r"q_proj\.bias has shape \[47\].*\[48\]",
    ),
    (
        "index names no file",
        lambda p: edit_index(p, **{UP: "c.safetensors"}),
        r"llama lacks c\.safetensors which its index names",
    ),
    (
        "index names the other file",
        lambda p: edit_index(p, **{UP: "b.safetensors"}),
        rf"{INDEX} says that b\.safetensors has tensor {UP}, but it is in a\.",
    ),
    (
        "index names no tensor",
        lambda p: edit_index(p, extra="a.safetensors"),
        rf"{INDEX} says that a\.safetensors has tensor extra, but no file has",
    ),
    (
        "index is a list",
        lambda p: (p / INDEX).write_text('{"weight_map": {"a": []}}'),
        rf"{INDEX} is not a weight index",
    ),
    ("code of its own", foreign_code, r"'mine' of \S+config\.json.*never run.*llama"),
]


@pytest.mark.parametrize(
    ("damage", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_file_and_the_tensor_at_fault_are_named(
    damage: Callable[[Path], object], message: str, model: Path
) -> None:
    damage(model)
    with pytest.raises(ModelLoadError, match=message):
        load(model)


def test_weights_in_two_files_load(model: Path) -> None:
    whole = load(model)
    in_two_files(model)
    assert load(model).vocab_size == whole.vocab_size


@pytest.mark.parametrize("weights", ["int8", "float32"])
def test_a_bias_that_is_missing_is_not_taken_for_zero(
    weights: Weights, tmp_path: Path
) -> None:
    path = save_tiny_model("qwen2", tmp_path)
    bias = "model.layers.0.self_attn.k_proj.bias"
    edit_tensors(path, **{bias: None})
    with pytest.raises(ModelLoadError, match=rf"{WEIGHTS} lacks 1 weight that.*{bias}"):
        load_runner(path, num_blocks=4, weights=weights)


def test_code_beside_a_known_architecture_is_ignored_and_told(model: Path) -> None:
    edit_config(model, auto_map={"AutoModelForCausalLM": "mine.Mine"})
    (model / "mine.py").write_text("raise SystemExit('this ran')")
    with capture_logs() as logs:
        load(model)
    (told,) = [entry for entry in logs if entry["event"] == "model_code_ignored"]
    assert told["log_level"] == "warning"
    assert "never run" in told["reason"]
    assert "LlamaForCausalLM" in told["reason"]


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


def test_a_wrong_shape_names_both_shapes(model: Path) -> None:
    edit_config(model, intermediate_size=96)
    with pytest.raises(ModelLoadError, match=r"80.*config\.json calls for.*96"):
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
