"""What a plan predicts of memory is what the engine then takes on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.plan_memory import tensors_of, weight_bytes
from support.ranks import Ranks
from support.tiny_models import VARIANTS, save_byte_tokenizer, save_tiny_model

from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.planning.cards import GIB, Card
from tokenmill.workers.planning.memory import MemoryTable, Use, memory_table
from tokenmill.workers.planning.shape import read_shape

SOURCE = Path(__file__).parents[2] / "src"
CHILD = Path(__file__).parents[1] / "support" / "plan_memory.py"
HOST = Card(
    name="cpu",
    memory_bytes=8 * GIB,
    bandwidth=1e10,
    tflops={"float32": 0.1},
    link=1e9,
    link_latency_s=1e-4,
    is_host=True,
)
RUNNING, BLOCKS = 8, 800
LAYERS, VOCABULARY = 12, 24576
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "float32",
}
"""As wide as the built-in model; as deep as it takes to drown the noise of a heap."""


@pytest.fixture(scope="module")
def plan_memory_model() -> Iterator[Path]:
    """A random checkpoint, removed at the end."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(CONFIG))
        save_byte_tokenizer(path)
        hidden, inner, keys = 576, 1536, 192
        tensors = {
            "model.embed_tokens.weight": drawn(VOCABULARY, hidden),
            "model.norm.weight": torch.ones(hidden),
        }
        for index in range(LAYERS):
            layer = f"model.layers.{index}"
            for name, rows, columns in (
                ("self_attn.q_proj", hidden, hidden),
                ("self_attn.k_proj", keys, hidden),
                ("self_attn.v_proj", keys, hidden),
                ("self_attn.o_proj", hidden, hidden),
                ("mlp.gate_proj", inner, hidden),
                ("mlp.up_proj", inner, hidden),
                ("mlp.down_proj", hidden, inner),
            ):
                tensors[f"{layer}.{name}.weight"] = drawn(rows, columns)
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{layer}.{name}.weight"] = torch.ones(hidden)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        yield path


def drawn(rows: int, columns: int) -> torch.Tensor:
    """Weights of a few values, which take no time to draw."""
    values = torch.linspace(-0.05, 0.05, 997).repeat(rows * columns // 997 + 1)
    return values[: rows * columns].view(rows, columns).contiguous()


def predicted(
    config: dict[str, object],
    weights: str,
    kv: str,
    chunk: int,
    blocks: int = BLOCKS,
    tp: int = 1,
) -> MemoryTable:
    """What a plan says of such a run."""
    use = Use(
        weights=weights,
        kv=kv,
        tp=tp,
        num_blocks=blocks,
        block_size=8,
        step_tokens=chunk + RUNNING - 1,
        rows=RUNNING,
    )
    return memory_table(read_shape(config, "config.json"), HOST, use)


CASES = (
    ("int8", "int8", 256),
    ("float32", "float32", 64),
    ("bfloat16", "int8", 8),  # hosts without bfloat16 instructions take long
    ("nf4", "int8", 8),
)
"""Weights, KV, tokens of the largest step's chunk."""


@pytest.fixture(scope="module")
def taken(
    plan_memory_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, int]]:
    """What a process of each precision takes, by weights."""
    tiny = save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))
    common = {"num_blocks": BLOCKS, "device": "cpu", "threads": 2, "running": RUNNING}
    settings = [
        {**common, "weights": weights, "kv": kv, "chunk": chunk}
        for weights, kv, chunk in CASES
    ]
    done = subprocess.run(
        [sys.executable, CHILD, plan_memory_model, tiny, json.dumps(settings)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip([case[0] for case in CASES], map(json.loads, lines), strict=True))


@pytest.mark.parametrize(("weights", "kv", "chunk"), CASES)
def test_a_process_grows_by_what_is_predicted(
    weights: str, kv: str, chunk: int, taken: dict[str, dict[str, int]]
) -> None:
    table, found = predicted(CONFIG, weights, kv, chunk), taken[weights]
    assert table.weights == pytest.approx(found["weights"], rel=0.02)
    assert table.kv == found["kv"]
    assert table.model == pytest.approx(found["grown"], rel=0.1)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("variant", ["llama", "llama-tied", "gpt2", "falcon-alibi"])
def test_tiny_models_take_the_bytes_that_are_predicted(
    variant: str, weights: str, tmp_path: Path
) -> None:
    family, _, _, settings = VARIANTS[variant]
    path = save_tiny_model(variant, tmp_path)
    runner = load_runner(path, weights=weights, num_blocks=20, device="cpu")  # type: ignore[arg-type]
    config = {"model_type": family, **settings}
    table = predicted(config, weights, "int8", 8, blocks=20)
    assert table.kv == sum(one.nbytes for one in tensors_of(list(runner._state.layers)))
    assert table.weights == pytest.approx(weight_bytes(runner), rel=0.1)


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_rank_takes_the_bytes_that_are_predicted(
    weights: str, tmp_path: Path
) -> None:
    config = {**VARIANTS["llama"][3], "model_type": "llama"}
    path = save_tiny_model("llama", tmp_path)
    table = predicted(config, weights, "int8", 8, blocks=20, tp=2)
    with Ranks(2, tmp_path / "rendezvous") as ranks:
        for runner in ranks.load(path, weights=weights, num_blocks=20):
            store = tensors_of(list(runner._state.layers))
            assert table.kv == sum(one.nbytes for one in store)
            assert table.weights == pytest.approx(weight_bytes(runner), rel=0.1)
