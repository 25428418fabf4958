"""What `doctor` says of a host as a worker: CPU, device, models' files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models import save_tiny_model

from tokenmill.shared.config import Config, ModelConfig, WorkerConfig
from tokenmill.workers import health, host
from tokenmill.workers.host import cpu_features, unfit_precisions


def named(config: Config, name: str) -> list[tuple[str, str]]:
    """Severity and message of the findings of that name."""
    found = health.findings(config)
    return [(one.severity, one.message) for one in found if one.name == name]


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the system's description of the CPU."""
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu sse avx avx2 avx_vnni", {"avx2", "avxvnni"}),
        ("flags : avx2 avx512_vnni amx_bf16", {"avx2", "avx512vnni", "amxbf16"}),
        ("Features\t: fp asimd asimddp i8mm bf16", {"dotprod", "i8mm", "bf16"}),
        ("flags : sse", set()),
        ("model name : avx2", None),
    ],
)
def test_features_are_read_by_any_system_s_names(
    cpu: Path, line: str, expected: set[str] | None
) -> None:
    cpu.write_text(f"processor : 0\n{line}\n")
    assert cpu_features() == expected


def test_a_cpu_without_int8_instructions_is_told_what_it_lacks(cpu: Path) -> None:
    cpu.write_text("flags : avx2\n")
    ((severity, message),) = named(Config(), "cpu")
    assert severity == "info"
    assert message.startswith("avx2;")
    assert "avxvnni" in message
    cpu.write_text("flags : avx2 avx_vnni\n")
    assert named(Config(), "cpu") == [("info", "avx2, avxvnni")]


def test_bfloat16_is_unfit_without_its_instructions(cpu: Path) -> None:
    cpu.write_text("flags : avx2\n")
    assert {"bfloat16", "float16", "nf4"} == set(unfit_precisions("cpu"))
    cpu.write_text("flags : avx2 avx512_bf16\n")
    assert "bfloat16" not in unfit_precisions("cpu")
    assert unfit_precisions("cuda") == {}


def test_a_device_that_is_wanted_and_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    ((severity, message),) = named(Config(), "device")
    assert severity == "info"
    assert "is a CPU build" in message
    wanting = Config(worker=WorkerConfig(device="cuda"))
    ((severity, message),) = named(wanting, "device")
    assert severity == "error"
    assert "worker.device is cuda" in message
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ((_, message),) = named(Config(), "device")
    assert "finds no device or driver" in message


def test_a_models_place_is_told(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    model = save_tiny_model("llama", tmp_path)
    models = (
        ModelConfig(name="a", path=str(model)),
        ModelConfig(name="b", path=str(file)),
        ModelConfig(name="owner/c"),
    )
    config = Config(models=models)
    ((severity, message),) = named(config, "calibration a")
    assert severity == "info"
    assert message.startswith("none")
    assert named(config, "files a") == [("info", f"directory {model}")]
    assert named(config, "files b") == [("info", f"file {file}")]
    assert "hub" in named(config, "files owner/c")[0][1]
