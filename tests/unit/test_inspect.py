"""The command `inspect`: a budget for people and for scripts, and advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from support.tiny_models import VARIANTS, save_tiny_model

from tokenmill.shared.errors import ConfigError, ModelLoadError
from tokenmill.workers import inspect_advice
from tokenmill.workers.cli_inspect import inspect_model


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the user's, and a known memory bandwidth."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKENMILL_CONFIG", raising=False)
    monkeypatch.setattr(inspect_advice, "host_bandwidth", lambda: 10e9)
    monkeypatch.setattr(inspect_advice, "compute_rates", lambda *_: {"int8": 1e9})
    # Logging is set once a process, here to a stream that closes with its test.
    monkeypatch.setattr("tokenmill.shared.logging.configure", lambda *_: None)


def as_json(capsys: pytest.CaptureFixture[str], model: Path, **options: Any) -> Any:
    """What the command prints with --json."""
    inspect_model(str(model), as_json=True, **options)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("variant", ["llama", "gpt2", "falcon-alibi", "glm4", "qwen3"])
def test_every_family_is_told_as_text_and_as_json(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_tiny_model(variant, tmp_path)
    told = as_json(capsys, path)
    assert told["family"] == VARIANTS[variant][0]
    inspect_model(str(path))
    text = capsys.readouterr().out
    for line in (
        f"{told['parameters']:,}",
        f"{told['max_context']:,} tokens",
        "int8 *",
        f"{told['kv']['int8']['bytes_per_token']:,}",
        f"{told['kv']['int8']['blocks']:,}",
        "- margin",
        "- weights",
        "worker.kv_memory_mb is 1,024",
    ):
        assert line in text, line
    assert "Advice" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_options_go_before_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_tiny_model("llama", tmp_path)
    settings = tmp_path / "tokenmill.toml"
    settings.write_text(
        f'[[models]]\nname = "mine"\npath = "{path}"\nweights = "float32"\n'
        "[worker]\nkv_memory_mb = 16\n"
    )
    told = as_json(capsys, Path("mine"))
    assert (told["path"], told["weights"]) == (str(path), "float32")
    assert told["memory"]["kv_limit_bytes"] == 16 * 2**20
    told = as_json(capsys, Path("mine"), weights="nf4", kv="float32", typical_tokens=64)
    assert (told["weights"], told["kv_kind"]) == ("nf4", "float32")
    pool = told["kv"]["float32"]
    assert pool["sequences_of_typical_tokens"] == pool["blocks"] // 8
    with pytest.raises(ConfigError, match=r"'int3'; expected one of int8, float32"):
        inspect_model(str(path), weights="int3")


def test_advice_comes_with_a_target_or_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_tiny_model("llama", tmp_path)
    told = as_json(capsys, path, slo_ms_per_token=50.0, running=2)
    advice = told["advice"]
    assert advice["chosen"]["weights"] == "float32"
    # What a step reads at 10 GB/s: all but the embedding, and two sequences' KV.
    read = told["weights_read_bytes"]["float32"]
    cached = 2 * 512 * told["kv_bytes_per_token"]["float32"]
    assert advice["chosen"]["step_ms"] == pytest.approx(1000 * (read + cached) / 10e9)
    with pytest.raises(typer.Exit) as left:
        inspect_model(str(path), memory_gb=0.51, slo_ms_per_token=0.0001)
    assert left.value.exit_code != 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Advice: none" in text
    assert "the target is 0.0001 ms" in text
    assert text.count("weights float16") == 1  # refused for all KV at once


def test_a_device_that_is_not_here_needs_its_bandwidth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = save_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="--bandwidth-gb-s"):
        inspect_model(str(path), device="cuda", memory_gb=24)
    told = as_json(capsys, path, device="cuda", memory_gb=24, bandwidth_gb_s=600)
    assert told["memory"]["free_bytes"] == 24 * 2**30
    assert told["advice"]["chosen"]["weights"] == "float32"
    with pytest.raises(ModelLoadError, match=r"no CUDA device.*--memory-gb"):
        inspect_model(str(path), device="cuda")
