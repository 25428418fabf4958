"""Files larger than the host's memory: looked into, read in parts, or refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model import room_check
from tokenmill.workers.engine.model.budget import MIB, FreeMemory
from tokenmill.workers.engine.model.calibration.fingerprint import weights_fingerprint
from tokenmill.workers.engine.model.checkpoint import iterate
from tokenmill.workers.engine.model.inspection import Question, describe
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.mapping import mapped_tensors
from tokenmill.workers.engine.parallel.reading import TensorCut, iterate_parts

WIDTH = 1 << 20


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint with a hole of twice the host's memory in it."""
    whole = psutil.virtual_memory().total + psutil.swap_memory().total
    rows = 2 * whole // (4 * WIDTH)
    size = rows * WIDTH * 4
    entry = {"dtype": "F32", "shape": [rows, WIDTH], "data_offsets": [0, size]}
    header = json.dumps({"weight": entry}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    return tmp_path


def test_a_file_larger_than_memory_is_named_by_its_weights(large: Path) -> None:
    ((name, tensor),) = iterate(large)
    assert name == "weight"
    assert tensor.nbytes > psutil.virtual_memory().total
    assert len(weights_fingerprint(large)) == 16


def test_a_rank_reads_its_part_of_a_file_larger_than_memory(large: Path) -> None:
    wanted = {"weight": TensorCut(0, ((1, 2),))}
    ((_, part),) = iterate_parts(large, wanted)
    assert part.shape == (1, WIDTH)
    beyond = {"weight": TensorCut(1, ((0, WIDTH + 1),))}
    with pytest.raises(ModelLoadError, match="fetch the checkpoint again"):
        list(iterate_parts(large, beyond))


def test_tensors_are_as_safetensors_reads_them(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
    made = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    made |= {"empty": torch.empty(0, 4), "one": torch.tensor(3.0)}
    file = tmp_path / "model.safetensors"
    save_file(made, file)
    found, expected = dict(mapped_tensors(file)), load_file(file)
    assert list(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    before = file.read_bytes()
    found["torch.float32"].fill_(7)  # stays with this process
    assert file.read_bytes() == before


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_float_weights_without_room_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    path = save_tiny_model(family, tmp_path)
    found = FreeMemory(512 * MIB, "host")  # the margin alone
    monkeypatch.setattr(room_check, "free_memory", lambda *_: found)
    with pytest.raises(ModelLoadError, match="MiB short; no precision fits here"):
        load_runner(path, weights="float32", device="cpu", threads=1)


def test_layers_that_are_merged_count_though_their_files_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model("llama", tmp_path)
    found = FreeMemory(20_000, "host")
    monkeypatch.setattr(room_check, "free_memory", lambda *_: found)
    options = {"num_blocks": 1, "device": "cpu", "threads": 1, "weights": "float32"}
    with pytest.raises(ModelLoadError) as raised:
        load_runner(path, **options)  # type: ignore[arg-type]
    assert "not enough memory" in str(raised.value)
    assert "num_blocks" not in str(raised.value)  # one is the fewest there can be
    load_runner(path, fused=False, **options)  # type: ignore[arg-type]


def test_what_is_said_to_fit_has_room_to_be_quantized_and_for_the_margin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model("llama", tmp_path)
    taken = describe(path, Question())["weights_bytes"]

    def told(size: int, **options: object) -> str:
        found = FreeMemory(size, "host")
        monkeypatch.setattr(room_check, "free_memory", lambda *_: found)
        with pytest.raises(ModelLoadError) as raised:
            load_runner(path, weights="bfloat16", device="cpu", threads=1, **options)  # type: ignore[arg-type]
        return str(raised.value)

    # It fits once it is quantized, and not while it is.
    assert "no precision fits" in told(taken["int8"] + 4096, num_blocks=1)
    # It fits, and not with the margin that the pool keeps.
    assert "no precision fits" in told(taken["int8"] + 500 * MIB)
