"""Memory figures: what weights and KV take, and what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_models import VARIANTS, save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.kv.store import KVShape, KVStore
from tokenmill.workers.engine.model import budget

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=8)


def test_bytes_per_token_are_what_the_store_allocates() -> None:
    for kind in ("int8", "float32"):
        store = KVStore(SHAPE, num_blocks=5, block_size=8, kind=kind)
        allocated = sum(
            tensor.nbytes
            for layer in store.layers
            for tensor in (layer.k, layer.v, layer.k_scale, layer.v_scale)
            if tensor is not None
        )
        assert store.nbytes == allocated


def test_the_pool_keeps_a_margin_of_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    per_block = SHAPE.bytes_per_token("int8") * 8
    monkeypatch.setattr(budget, "free_memory", lambda: budget.MARGIN_BYTES + 10_000)
    blocks = budget.pool_blocks(SHAPE, kind="int8", block_size=8, kv_memory_mb=1024)
    assert blocks == 10_000 // per_block
    monkeypatch.setattr(budget, "free_memory", lambda: 100 * 1024 * budget.MIB)
    blocks = budget.pool_blocks(SHAPE, kind="int8", block_size=8, kv_memory_mb=3)
    assert blocks == 3 * budget.MIB // per_block


def test_no_room_names_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_memory", lambda: 100 * budget.MIB)
    with pytest.raises(ModelLoadError, match=r"100 MiB are free, 512 MiB.*margin"):
        budget.pool_blocks(SHAPE, kind="int8", block_size=8, kv_memory_mb=64)


def test_free_memory_is_between_nothing_and_the_host() -> None:
    import psutil

    assert 0 < budget.free_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "gpt2", "falcon-grouped"])
def test_describe_counts_what_is_in_the_files(variant: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = save_tiny_model(variant, tmp_path)
    report = budget.describe(path, num_blocks=40, block_size=8)
    json.dumps(report)  # plain values
    tensors = load_file(path / "model.safetensors")
    stored = sum(tensor.numel() for tensor in tensors.values())
    assert report["parameters"] == stored
    assert report["family"] == VARIANTS[variant][0]
    assert report["kv"]["int8"]["tokens"] == 320  # type: ignore[index]
    weights = report["weights_bytes"]
    assert weights["nf4"] < weights["int8"] < weights["float32"]  # type: ignore[index]


def test_describe_respects_the_context_cap(tmp_path: Path) -> None:
    path = save_tiny_model("llama-dynamic", tmp_path)
    assert budget.describe(path, num_blocks=8)["max_context"] == 48 * 4
    assert budget.describe(path, num_blocks=8, max_context=50)["max_context"] == 50


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        b"short",
        b"",
        (8).to_bytes(8, "little") + b"[1, 2, 3",
        (9).to_bytes(8, "little") + b'{"a": []}',
        (30).to_bytes(8, "little") + b'{"a": {"data_offsets": [0,9]}}',
    ],
    ids=range(6),
)
def test_a_file_that_is_no_safetensors_is_a_load_error(
    content: bytes, tmp_path: Path
) -> None:
    path = save_tiny_model("llama", tmp_path)
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match="not a whole safetensors file"):
        budget.describe(path, num_blocks=4)


def test_a_file_that_is_cut_short_is_told_with_both_sizes(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    sizes = f"{len(whole) - 100} of {len(whole)} bytes"
    with pytest.raises(ModelLoadError, match=sizes):
        budget.describe(path, num_blocks=4)


def test_a_missing_tokenizer_is_told(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    assert budget.describe(path, num_blocks=4)["missing_files"] == []
    (path / "tokenizer.json").unlink()
    assert budget.describe(path, num_blocks=4)["missing_files"] == ["tokenizer.json"]
