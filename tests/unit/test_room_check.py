"""A host that cannot hold a model refuses it before its weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model import budget, room_check
from tokenmill.workers.engine.model.budget import MIB, FreeMemory, pool_blocks
from tokenmill.workers.engine.model.inspection import Question, describe
from tokenmill.workers.engine.model.load import load_runner


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Lets the host have so many bytes free."""
    found = FreeMemory(size, "host")
    monkeypatch.setattr(room_check, "free_memory", lambda *_: found)


def test_what_does_not_fit_is_told_with_what_is_short_and_what_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model("llama", tmp_path)
    monkeypatch.setattr(room_check, "_QUANTIZING", 0)  # most of what a tiny one takes
    free(monkeypatch, 400_000)
    pool = {"num_blocks": 4, "device": "cpu", "threads": 1}
    assert load_runner(path, weights="int8", **pool).num_blocks == 4  # type: ignore[arg-type]
    taken = describe(path, Question(num_blocks=4))["weights_bytes"]
    free(monkeypatch, taken["bfloat16"])  # and nothing for KV
    with pytest.raises(ModelLoadError) as raised:
        load_runner(path, weights="bfloat16", **pool)  # type: ignore[arg-type]
    told = str(raised.value)
    assert "not enough memory for" in told
    assert "of bfloat16 weights" in told
    assert "MiB short" in told
    assert "what would fit: weights='int8'" in told
    assert "tokenmill plan" in told


def test_nothing_that_fits_is_said_to_be_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model("gpt2", tmp_path)
    free(monkeypatch, 1000)
    with pytest.raises(ModelLoadError, match="no precision fits here"):
        load_runner(path, weights="nf4", device="cpu", threads=1)


def test_weights_that_are_mapped_may_be_larger_than_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model("gpt2", tmp_path)
    free(monkeypatch, 60_000)
    options = {"num_blocks": 4, "kv": "int8", "device": "cpu", "threads": 1}
    assert load_runner(path, weights="float32", **options).num_blocks == 4  # type: ignore[arg-type]


def test_a_pool_without_room_says_what_is_short_or_which_bound_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tokenmill.workers.engine.kv.store import KVShape

    shape = KVShape(num_layers=64, num_kv_heads=64, head_dim=128)
    monkeypatch.setattr(budget, "free_memory", lambda _: FreeMemory(500 * MIB, "host"))
    with pytest.raises(ModelLoadError, match=r"2\d MiB short: free as much"):
        pool_blocks(shape, kind="int8", block_size=8, kv_memory_mb=64)
    monkeypatch.setattr(budget, "free_memory", lambda _: FreeMemory(5000 * MIB, "host"))
    with pytest.raises(ModelLoadError, match="raise kv_memory_mb to 9 at least"):
        pool_blocks(shape, kind="int8", block_size=8, kv_memory_mb=4)
