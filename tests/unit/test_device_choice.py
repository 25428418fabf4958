"""Which device a model gets, and which layers a precision gets on it."""

from __future__ import annotations

import sys

import pytest
import torch
from structlog.testing import capture_logs

from tokenmill.shared.config import Config, ModelConfig
from tokenmill.shared.config_check import check
from tokenmill.shared.errors import ConfigError, ModelLoadError
from tokenmill.workers.engine.kernels import ops as host_ops
from tokenmill.workers.engine.model import device
from tokenmill.workers.engine.model.calibration.tuning import Tuning
from tokenmill.workers.engine.model.device import choose_target, host_target
from tokenmill.workers.engine.model.gpu.device_slots import (
    device_maker,
    outlier_columns,
)
from tokenmill.workers.engine.model.gpu.linear import gpu_ops


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    target = choose_target("auto", "int8")
    assert (target.name, target.ops, target.dtype) == ("cpu", host_ops, torch.float32)
    assert not target.is_accelerator


@pytest.mark.usefixtures("no_gpu")
def test_cuda_that_is_not_there_says_what_to_install() -> None:
    with pytest.raises(ModelLoadError, match=r"sees no CUDA device.*CUDA build"):
        choose_target("cuda", "int8")


def test_cuda_without_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModelLoadError, match=r"triton.*tokenmill\[gpu\]"):
        choose_target("cuda", "int8")


@pytest.mark.parametrize(
    ("capability", "weights", "dtype"),
    [
        ((7, 5), "int8", torch.float16),
        ((8, 0), "int8", torch.bfloat16),
        ((9, 0), "float16", torch.float16),
        ((7, 5), "bfloat16", torch.bfloat16),
        ((9, 0), "float32", torch.float32),
    ],
)
def test_activations_are_half_precision_on_a_gpu(
    capability: tuple[int, int],
    weights: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    target = choose_target("auto", weights)  # type: ignore[arg-type]
    assert (target.name, target.dtype) == ("cuda:1", dtype)
    assert target.is_accelerator


def test_caches_are_released_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append("cuda"))
    device.release_caches(torch.device("cpu"))
    assert released == []
    device.release_caches(torch.device("cuda", 0))
    assert released == ["cuda"]


def test_eight_bit_rows_need_a_gpu() -> None:
    target = host_target("int8-a8")
    with pytest.raises(ModelLoadError, match="needs a GPU"):
        device_maker("int8-a8", target, lambda _: target.device, Tuning())


def test_outlier_columns_are_the_inputs_that_are_largest_on_average() -> None:
    mean = torch.zeros(40)
    mean[[3, 17]] = torch.tensor([-5.0, 4.0])
    tuning = Tuning(means={"layers.2.down": mean})
    columns = outlier_columns(tuning, "model.layers.2.mlp.down_proj")
    assert set(columns[:2]) == {3, 17}
    assert len(columns) == 16
    assert outlier_columns(tuning, "model.layers.1.mlp.down_proj") == []


@pytest.mark.parametrize(
    ("weights", "threshold", "linears", "expected"),
    [
        ("int8-bnb", 0.0, ("qkv", "output"), [["gate_up", "down"]]),
        ("int8-a8", 0.0, (), [["qkv", "output", "gate_up", "down"]]),
        ("int8-bnb", 6.0, (), []),
        ("int8", 0.0, (), []),
    ],
)
def test_layers_without_outlier_columns_are_named_once(
    weights: str, threshold: float, linears: tuple[str, ...], expected: list[list[str]]
) -> None:
    pytest.importorskip("triton")
    cpu = torch.device("cpu")
    target = device.Target(cpu, gpu_ops(cpu), torch.float32)
    means = {f"layers.{i}.{name}": torch.ones(8) for i in (0, 1) for name in linears}
    with capture_logs() as logs:
        make = device_maker(
            weights,  # type: ignore[arg-type]
            target,
            lambda _: cpu,
            Tuning(means=means),
            threshold=threshold,
        )
        assert make is not None
        for _ in range(2):
            make("model.layers.1.mlp.down_proj", 8, 8)
    found = [log["layers"] for log in logs if log["event"] == "no_outlier_columns"]
    assert found == expected


def test_eight_bit_layers_multiply_by_the_product_that_the_report_names() -> None:
    pytest.importorskip("triton")
    cpu = torch.device("cpu")
    target = device.Target(cpu, gpu_ops(cpu), torch.float32)
    make = device_maker("int8-a8", target, lambda _: cpu, Tuning())
    assert make is not None
    layers = [make(f"model.layers.{i}.mlp.down_proj", 8, 8) for i in (0, 1)]
    assert all(layer.matmul is target.ops.int8_matmul for layer in layers)  # type: ignore[attr-defined]
    plain = gpu_ops(cpu, measured=False).backend_report()
    assert plain["int8_matmul"] == "triton"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig(outlier_threshold=6.0), "only 'int8-bnb' has a threshold"),
        (ModelConfig(weights="int8-bnb", outlier_threshold=-1.0), "0 .none. to 1000"),
    ],
)
def test_a_threshold_that_means_nothing_is_refused(
    model: ModelConfig, message: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"models\[0\]\.outlier_threshold.*{message}"
    ):
        check(Config(models=(model,)), {})
    check(Config(models=(ModelConfig(weights="int8-bnb", outlier_threshold=6.0),)), {})
