"""What a model given on a command line is called, and where it is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.shared.config_load import load_config
from tokenmill.shared.model_choice import model_named, public_name
from tokenmill.shared.pool.starting import Overrides, overridden


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two models in it, the current one."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "other.Q8_0.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKENMILL_CONFIG", raising=False)
    monkeypatch.delenv("TOKENMILL_MODELS", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "name", "path"),
    [
        ("./tiny", "tiny", "tiny"),
        ("tiny/", "tiny", "tiny"),
        ("other.Q8_0.gguf", "other.Q8_0", "other.Q8_0.gguf"),
        ("owner/name", "owner/name", None),
        ("smollm2-135m", "smollm2-135m", None),
    ],
)
def test_paths_are_served_under_their_last_part(
    wanted: str, name: str, path: str | None, models: Path
) -> None:
    model = model_named(wanted)
    assert model.name == public_name(wanted) == name
    assert model.path == (None if path is None else str(models / path))


def test_up_takes_paths_and_keeps_the_settings_of_known_names(models: Path) -> None:
    settings = models / "pool.toml"
    settings.write_text('[[models]]\nname = "mine"\npath = "tiny"\nkv = "float32"\n')
    loaded = load_config(settings)
    config = overridden(loaded, Overrides(models=("mine", "./tiny")))
    mine, tiny = config.models
    assert (mine.name, mine.kv) == ("mine", "float32")
    assert (tiny.name, tiny.path, tiny.kv) == ("tiny", str(models / "tiny"), "int8")
