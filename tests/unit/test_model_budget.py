"""Memory figures: what weights and KV take, and what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.tiny_models import VARIANTS, save_tiny_model

from tokenmill.shared.config import ModelConfig, WorkerConfig
from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.kv.store import KVKind, KVShape, KVStore
from tokenmill.workers.engine.model import budget
from tokenmill.workers.engine.model.budget import FreeMemory, pool_blocks
from tokenmill.workers.engine.model.headers import read_headers
from tokenmill.workers.engine.model.inspection import KINDS, Question, describe
from tokenmill.workers.engine.model.sizes import mapped_bytes
from tokenmill.workers.runner_loading import load_model_runner

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=8)


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Lets every device have so many bytes free."""
    monkeypatch.setattr(budget, "free_memory", lambda _device: FreeMemory(size, "host"))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_per_token_are_what_the_store_allocates(kind: KVKind) -> None:
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
    free(monkeypatch, budget.MARGIN_BYTES + 10_000)
    blocks = pool_blocks(SHAPE, kind="int8", block_size=8, kv_memory_mb=1024)
    assert blocks == 10_000 // per_block
    free(monkeypatch, 100 * 1024 * budget.MIB)
    blocks = pool_blocks(SHAPE, kind="int8", block_size=8, kv_memory_mb=3)
    assert blocks == 3 * budget.MIB // per_block
    blocks = pool_blocks(SHAPE, kind="int8", block_size=8, kv_memory_mb=None)
    assert blocks == 90 * 1024 * budget.MIB // per_block


def test_weights_that_only_look_free_are_kept_from_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, budget.MARGIN_BYTES + 30_000)
    blocks = pool_blocks(
        SHAPE, kind="int8", block_size=8, kv_memory_mb=None, reserved=20_000
    )
    assert blocks == 10_000 // (SHAPE.bytes_per_token("int8") * 8)


def test_adapters_that_the_margin_has_no_room_for_are_kept_from_the_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = save_tiny_model("llama", tmp_path)
    free(monkeypatch, budget.MARGIN_BYTES + 9 * budget.MIB)
    model = ModelConfig(name="tiny", path=str(path))

    def pool_bytes(adapters_mb: int) -> int:
        worker = WorkerConfig(adapters_memory_mb=adapters_mb, threads=1)
        return load_model_runner(path, model, worker).kv_bytes

    whole = pool_bytes(256)
    assert whole == pool_bytes(0)
    assert whole - pool_bytes(256 + 6) == pytest.approx(6 * budget.MIB, rel=0.01)


def test_float_weights_of_the_stored_type_are_views_and_others_copies(
    tmp_path: Path,
) -> None:
    tensors = read_headers(save_tiny_model("llama", tmp_path))
    values = sum(tensor.size for tensor in tensors.values())
    assert mapped_bytes(tensors, "float32") == 4 * values
    for precision in ("bfloat16", "float16", "int8", "nf4"):
        assert mapped_bytes(tensors, precision) == 0


def test_a_start_logs_what_the_pool_was_sized_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, 2048 * budget.MIB)
    with capture_logs() as logs:
        blocks = pool_blocks(SHAPE, kind="int8", block_size=8, kv_memory_mb=3)
    assert logs == [
        {
            "event": "kv_pool_sized",
            "log_level": "info",
            "free_mib": 2048,
            "free_by": "host",
            "margin_mib": 512,
            "weights_mib": 0,
            "limit_mib": 3,
            "pool_mib": 3,
            "blocks": blocks,
            "tokens": 8 * blocks,
            "typical_tokens": 512,
            "typical_sequences": 8 * blocks // 512,
        }
    ]


def test_no_room_names_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 100 * budget.MIB)
    with pytest.raises(ModelLoadError, match=r"100 MiB are free.*512 MiB.*margin"):
        pool_blocks(SHAPE, kind="int8", block_size=8, kv_memory_mb=64)


def test_free_memory_is_between_nothing_and_the_host() -> None:
    import psutil

    found = budget.free_memory()
    assert 0 < found.size <= psutil.virtual_memory().total
    assert found.source in ("host", "cgroup limit")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("1000000", 1_000_000 - 400_000 + 50_000), ("max", None), ("junk", None)],
)
def test_a_container_s_limit_bounds_what_is_free(
    limit: str,
    expected: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 50000\n")
    monkeypatch.setattr(budget, "_CGROUP", tmp_path)
    found = budget.free_memory()
    if expected is None:
        assert found.source == "host"
    else:
        assert found == FreeMemory(expected, "cgroup limit")


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "gpt2", "falcon-grouped"])
def test_describe_counts_what_is_in_the_files(variant: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = save_tiny_model(variant, tmp_path)
    report = describe(path, Question(num_blocks=40, block_size=8))
    json.dumps(report)  # plain values
    tensors = load_file(path / "model.safetensors")
    stored = sum(tensor.numel() for tensor in tensors.values())
    assert report["parameters"] == stored
    assert report["family"] == VARIANTS[variant][0]
    assert report["kv"]["int8"]["tokens"] == 320
    weights = report["weights_bytes"]
    assert weights["nf4"] < weights["int8"] < weights["float32"]
    assert weights["float32"] == 4 * stored
    for precision, parts in report["weights_by_part"].items():
        assert sum(parts.values()) == weights[precision]


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "gpt2", "falcon-grouped"])
def test_weights_take_in_memory_what_is_told(variant: str, tmp_path: Path) -> None:
    from tokenmill.workers.engine.model.load import load_runner

    path = save_tiny_model(variant, tmp_path)
    told = describe(path, Question(num_blocks=4))
    runner = load_runner(path, num_blocks=4, weights="int8", fused=False)
    packed = [
        module.packed
        for module in {*runner._decoder._base.modules(), runner._head}
        if hasattr(module, "packed")
    ]
    kept = sum(weight.out_features * (weight.in_features + 4) for weight in packed)
    parts = told["weights_by_part"]["int8"]
    assert parts["linear"] + parts["head"] == kept


def test_the_pool_leaves_room_for_weights_that_are_still_to_be_loaded(
    tmp_path: Path,
) -> None:
    path = save_tiny_model("llama", tmp_path)
    told = describe(
        path,
        Question(memory_bytes=1024 * budget.MIB, weights="float32", kv_memory_mb=None),
    )
    memory = told["memory"]
    assert memory["weights_bytes"] == told["weights_bytes"]["float32"]
    assert memory["margin_bytes"] == budget.MARGIN_BYTES
    room = memory["pool_room_bytes"]
    assert room == 512 * budget.MIB - memory["weights_bytes"]
    for kind, pool in told["kv"].items():
        assert room - 8 * pool["bytes_per_token"] < pool["bytes"] <= room, kind
        assert pool["sequences_of_typical_tokens"] == pool["blocks"] // 64


def test_a_device_without_room_is_told_with_a_pool_of_nothing(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    told = describe(path, Question(memory_bytes=budget.MIB))
    assert told["kv"]["int8"]["blocks"] == 0
    assert told["memory"]["pool_room_bytes"] == 0


def test_describe_respects_the_context_cap(tmp_path: Path) -> None:
    path = save_tiny_model("llama-dynamic", tmp_path)
    assert describe(path, Question(num_blocks=8))["max_context"] == 48 * 4
    assert describe(path, Question(num_blocks=8, max_context=50))["max_context"] == 50


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
        describe(path, Question(num_blocks=4))


def test_a_file_that_is_cut_short_is_told_with_both_sizes(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    sizes = rf"in tensor model\..*{len(whole) - 100} of {len(whole)} bytes"
    with pytest.raises(ModelLoadError, match=sizes):
        describe(path, Question(num_blocks=4))
