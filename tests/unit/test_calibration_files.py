"""Calibration files: kept, found in order, refused when damaged or foreign."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model.calibration import files
from tokenmill.workers.engine.model.calibration.fingerprint import weights_fingerprint
from tokenmill.workers.engine.model.calibration.result import (
    Calibration,
    Facts,
    LayerLoss,
    calibration_facts,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def calibration(path: Path, text: str = "a text", **changes: object) -> Calibration:
    facts = {
        "fingerprint": weights_fingerprint(path),
        "text": text,
        "samples": 3,
        "tokens": 96,
        "sensitive": (LayerLoss("model.layers.1.mlp.down_proj", 0.25, 3840),),
        "loss_percent": 0.5,
        **changes,
    }
    tensors = {"layers.0.key_scale": torch.tensor([[0.5, 2.0, 1.0, 4.0]] * 2)}
    return Calibration(Facts(**facts), tensors)  # type: ignore[arg-type]


def test_a_file_gives_back_what_was_written(model: Path, tmp_path: Path) -> None:
    made = calibration(model)
    files.write_calibration(made, tmp_path / "deep" / "one.safetensors")
    found = files.read_calibration(tmp_path / "deep" / "one.safetensors")
    assert found.facts == made.facts
    assert found.digest == made.digest
    for name, values in made.tensors.items():
        assert torch.equal(found.tensors[name], values)
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep/one.safetensors"]


def test_the_digest_follows_scales_and_sensitive_layers(model: Path) -> None:
    made = calibration(model)
    other = {"layers.0.key_scale": made.tensors["layers.0.key_scale"] * 2}
    assert made.digest != Calibration(made.facts, other).digest
    assert made.digest != calibration(model, sensitive=()).digest
    assert made.digest == calibration(model, samples=4).digest


def test_beside_the_checkpoint_goes_before_the_cache(model: Path) -> None:
    assert files.find_calibration(model).calibration is None
    name = f"{weights_fingerprint(model)}.safetensors"
    files.write_calibration(calibration(model, "cache"), files.cache_folder() / name)
    found = files.find_calibration(model)
    assert found.calibration is not None
    assert found.calibration.facts.text == "cache"
    assert found.source.startswith("cache")
    files.write_calibration(calibration(model, "beside"), model / files.FILE_NAME)
    found = files.find_calibration(model)
    assert found.calibration is not None
    assert found.calibration.facts.text == "beside"


def test_it_is_kept_beside_or_else_in_the_cache(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calibration(model)
    assert files.save_for(made, model) == model / files.FILE_NAME
    write = files.write_calibration

    def refuse_beside(one: Calibration, file: Path) -> None:
        if file.parent == model:
            raise PermissionError(13, "read-only", str(file))
        write(one, file)

    monkeypatch.setattr(files, "write_calibration", refuse_beside)
    assert files.save_for(made, model).parent == files.cache_folder()
    assert files.cache_folder().name == "calibrations"


def test_other_weights_pass_over_a_calibration(model: Path) -> None:
    made = calibration(model)
    files.write_calibration(made, model / files.FILE_NAME)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, model / "model.safetensors")
    assert files.find_calibration(model).calibration is None
    with pytest.raises(ModelLoadError, match=made.facts.fingerprint):
        files.checked_calibration(model / files.FILE_NAME, model)


@pytest.mark.parametrize("damage", ["cut", "foreign", "nan", "zero", "format"])
def test_a_damaged_file_is_named_and_passed_over(model: Path, damage: str) -> None:
    file = model / files.FILE_NAME
    files.write_calibration(calibration(model), file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "foreign":
        save_file({"layers.0.key_scale": torch.ones(2)}, file)
    elif damage == "format":
        files.write_calibration(calibration(model, format=99), file)
    else:
        bad = calibration(model)
        bad.tensors["layers.0.key_scale"][0, 0] = {"nan": float("nan"), "zero": 0}[  # type: ignore[index]
            damage
        ]
        files.write_calibration(bad, file)
    with pytest.raises(ModelLoadError, match="tokenmill calibrate"):
        files.read_calibration(file)
    assert files.find_calibration(model).calibration is None


def test_the_fingerprint_is_of_weights_and_not_of_files(
    model: Path, tmp_path: Path
) -> None:
    weights = load_file(model / "model.safetensors")
    split = tmp_path / "split"
    split.mkdir()
    for number, part in enumerate((sorted(weights)[:5], sorted(weights)[5:])):
        save_file(
            {name: weights[name] for name in part}, split / f"{number}.safetensors"
        )
    assert weights_fingerprint(split) == weights_fingerprint(model)


def test_inspect_lists_the_sensitive_layers(model: Path) -> None:
    assert calibration_facts(model)["sensitive_layers"] == []
    files.write_calibration(calibration(model), model / files.FILE_NAME)
    facts = calibration_facts(model)
    assert facts["sensitive_layers"] == ["model.layers.1.mlp.down_proj (0.2500 %)"]
    assert facts["samples"] == 3


def test_shipped_calibrations_are_small_and_of_512_samples() -> None:
    shipped = sorted(files.SHIPPED.glob("*.safetensors"))
    assert shipped
    for file in shipped:
        assert file.stat().st_size < 400_000
        facts = files.read_calibration(file).facts
        assert facts.fingerprint == file.stem
        assert facts.samples == 512
        assert 0 < facts.loss_percent < facts.plain_loss_percent / 2
        assert 1 <= len(facts.sensitive) <= 6


def test_every_process_names_a_calibration_alike(tmp_path: Path) -> None:
    code = (
        "from tokenmill.workers.engine.model.calibration.files import "
        "SHIPPED, read_calibration\n"
        "path, = SHIPPED.glob('*.safetensors')\n"
        "print(read_calibration(path).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1, "a restarted worker could not go on with its jobs"
