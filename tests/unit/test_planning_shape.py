"""Sizes by formula are those of the library's models and of the engine's ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import VARIANTS

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.kv.store import KVShape
from tokenmill.workers.engine.model import rope
from tokenmill.workers.engine.model.families import FAMILIES, kv_shape
from tokenmill.workers.engine.model.headers import StoredTensor
from tokenmill.workers.engine.model.sizes import count_parameters as count_stored
from tokenmill.workers.engine.parallel.cuts import find_cut, layer_cuts
from tokenmill.workers.engine.parallel.shard import Shard, degrees
from tokenmill.workers.planning.parameters import (
    KV_KINDS,
    count_parameters,
    kv_bytes_per_token,
)
from tokenmill.workers.planning.refusal import check_served
from tokenmill.workers.planning.shape import ModelShape, read_shape

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def made(family: str, **settings: object) -> tuple[Any, dict[str, torch.Size], bool]:
    """A configuration, the shapes of its model's parameters, and whether it is tied."""
    known = FAMILIES[family]
    module = importlib.import_module(f"{known.package}.configuration_{family}")
    config = getattr(module, known.config_class)(**settings)
    with torch.device("meta"):
        model = known.load_class()(config)
    model.tie_weights()
    shapes = {name: value.shape for name, value in model.named_parameters()}
    return config, shapes, "lm_head.weight" not in shapes


def stored(shapes: dict[str, torch.Size]) -> dict[str, StoredTensor]:
    """The same as a checkpoint's headers tell it."""
    return {
        name: StoredTensor(Path("model.safetensors"), tuple(shape), "F32")
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_the_sizes_of_its_model(variant: str) -> None:
    family, _, _, settings = VARIANTS[variant]
    config, shapes, _ = made(family, **settings)
    content = {"model_type": family, **settings}
    shape = read_shape(content, "config.json")
    assert count_parameters(shape) == count_stored(stored(shapes), config)
    assert shape.context == rope.context_limit(config)
    assert read_shape(config.to_dict(), "config.json") == msgspec_replaced(
        shape, config
    )
    for kind in KV_KINDS:
        expected = kv_shape(config).bytes_per_token(kind)  # type: ignore[arg-type]
        assert kv_bytes_per_token(shape, kind) == expected


def msgspec_replaced(shape: ModelShape, config: Any) -> ModelShape:
    """The shape with the type that a saved configuration names."""
    import msgspec

    named = config.to_dict().get("dtype")
    return msgspec.structs.replace(shape, stored=named)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_as_in_the_library(family: str) -> None:
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": 1}
    config, shapes, _ = made(family, **layers)
    shape = read_shape({"model_type": family, **layers}, "config.json")
    assert count_parameters(shape) == count_stored(stored(shapes), config)
    assert shape.context == rope.context_limit(config)


@pytest.mark.parametrize(
    ("content", "parameters"),
    [
        ({"model_type": "gpt2"}, 124_439_808),
        ({"model_type": "llama"}, 6_738_415_616),
        ({"model_type": "mistral"}, 7_241_732_096),
        (LLAMA_3_8B, 8_030_261_248),
    ],
    ids=("gpt2", "Llama-2-7B", "Mistral-7B", "Llama-3-8B"),
)
def test_known_models_have_their_known_number_of_parameters(
    content: dict[str, object], parameters: int
) -> None:
    assert count_parameters(read_shape(content, "config.json")).total == parameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rank_holds_what_the_engine_cuts_for_it(variant: str) -> None:
    family, _, _, settings = VARIANTS[variant]
    config, shapes, _ = made(family, **settings)
    shape = read_shape({"model_type": family, **settings}, "config.json")
    for size in degrees(config):
        held = [held_by(config, shapes, Shard(rank, size)) for rank in range(size)]
        counts = count_parameters(shape, size)
        assert counts.total == pytest.approx(max(held), rel=0.01), size
        assert counts.total >= max(held)


def held_by(config: Any, shapes: dict[str, torch.Size], shard: Shard) -> int:
    """Parameters that the engine's cuts leave a rank."""
    cuts = layer_cuts(config, shard)
    total = 0
    for name, shape in shapes.items():
        owner, _, leaf = name.rpartition(".")
        cut = find_cut(cuts, owner)
        count = shape.numel()
        if cut is None or (leaf == "bias" and cut.side == "inputs"):
            total += count
            continue
        transposed = config.model_type == "gpt2" and len(shape) == 2 and "h." in name
        dim = (cut.side == "inputs") != transposed if leaf == "weight" else 0
        total += count // shape[int(dim)] * cut.width
    return total


def test_kv_heads_are_repeated_where_there_are_fewer_than_ranks() -> None:
    shape = read_shape(LLAMA_3_8B, "config.json")
    whole = KVShape(num_layers=32, num_kv_heads=8, head_dim=128).bytes_per_token("int8")
    assert kv_bytes_per_token(shape, "int8", 8) == whole // 8
    assert kv_bytes_per_token(shape, "int8", 16) == whole // 8
    assert kv_bytes_per_token(shape, "int8", 2) == whole // 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; expected a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 5}, "32 attention heads are no multiple of 5"),
        ({"hidden_size": 16}, "less than its 32 heads"),
    ],
)
def test_sizes_that_no_model_has_are_refused(
    changes: dict[str, object], told: str
) -> None:
    with pytest.raises(ModelLoadError, match=told):
        read_shape({**LLAMA_3_8B, **changes}, "config.json")


@pytest.mark.parametrize(
    ("content", "kind", "engine"),
    [
        (
            {"model_type": "mixtral", "num_local_experts": 8},
            "mixture of experts",
            "vLLM",
        ),
        ({"model_type": "qwen3_moe"}, "mixture of experts", "SGLang"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "experts", "TensorRT"),
        ({"model_type": "bert"}, "an encoder", "Text Embeddings Inference"),
        ({"model_type": "t5"}, "encoder with a decoder", "CTranslate2"),
        ({"model_type": "x", "is_encoder_decoder": True}, "with a decoder", "CTrans"),
        ({"model_type": "mamba"}, "without a KV cache", "vLLM"),
        ({"model_type": "gemma3"}, "not served", "if they list it"),
        ({"model_type": "llava", "vision_config": {"a": 1}}, "images", "vLLM"),
        (
            {"model_type": "llama", "quantization_config": {"bits": 4}},
            "quantized already",
            r"llama\.cpp",
        ),
    ],
)
def test_what_is_not_served_is_refused_with_what_would_serve_it(
    content: dict[str, object], kind: str, engine: str
) -> None:
    with pytest.raises(ModelLoadError, match=kind) as raised:
        check_served(content, "config.json")
    assert raised.match(engine)


def test_a_served_model_is_not_refused() -> None:
    for family in FAMILIES:
        check_served({"model_type": family}, "config.json")
