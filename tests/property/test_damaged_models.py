"""Wrong bytes in a model's files give a load error, or a model, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model.inspection import Question, describe
from tokenmill.workers.engine.model.resolve import resolve_model

CHANGES = st.dictionaries(st.floats(0, 1), st.integers(0, 255), min_size=1, max_size=4)
"""New bytes by their place, as a fraction of what is damaged."""
THOROUGH = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps conversions out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in both forms, to be damaged."""
    directory = tmp_path_factory.mktemp("models")
    write_tiny_gguf(directory / "tiny.gguf")
    return save_tiny_model("llama", directory)


def damage(file: Path, whole: bytes, changes: Mapping[float, int], span: int) -> None:
    """Writes a file with some of its first bytes changed."""
    data = bytearray(whole)
    for place, value in changes.items():
        data[int(place * (min(span, len(data)) - 1))] = value
    file.write_bytes(data)


def check_read(path: Path) -> None:
    """Reads all that is read before the weights; only load errors may come."""
    try:
        told = describe(resolve_model("any", str(path)), Question(num_blocks=8))
    except ModelLoadError:
        return
    assert told["parameters"] > 0


@THOROUGH
@given(CHANGES)
def test_a_damaged_gguf_file(model: Path, changes: Mapping[float, int]) -> None:
    source = model.parent / "tiny.gguf"
    target = model.parent / "damaged.gguf"
    damage(target, source.read_bytes(), changes, span=12_000)  # its metadata
    check_read(target)


@THOROUGH
@given(CHANGES, st.sampled_from(["model.safetensors", "config.json"]))
def test_a_damaged_checkpoint(
    model: Path, changes: Mapping[float, int], name: str
) -> None:
    whole = (model / name).read_bytes()
    try:
        damage(model / name, whole, changes, span=2500)  # its header
        check_read(model)
    finally:
        (model / name).write_bytes(whole)
