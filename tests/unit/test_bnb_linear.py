"""bitsandbytes' layers on a CPU: error, outlier columns, independence of rows."""

from __future__ import annotations

import pytest
import torch

from tokenmill.shared.errors import EngineError
from tokenmill.workers.engine.model.gpu.bnb_linear import (
    BitsAndBytesInt8Linear,
    BitsAndBytesNf4Linear,
)
from tokenmill.workers.engine.model.gpu.device_linear import Place

CPU = torch.device("cpu")
PLACE = Place(CPU, CPU, torch.float32)
OUTLIERS = (3, 40)


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs with two loud columns, a weight and a bias."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 160, generator=generator)
    x[:, OUTLIERS] *= 60
    weight = torch.randn(48, 160, generator=generator)
    return x, weight, torch.randn(48, generator=generator)


def int8(
    weight: torch.Tensor, bias: torch.Tensor, **settings: object
) -> BitsAndBytesInt8Linear:
    layer = BitsAndBytesInt8Linear(160, 48, PLACE, **settings)  # type: ignore[arg-type]
    layer.fill_bias(bias)
    layer.fill(weight)
    return layer


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual - exact).norm() / exact.norm())


@torch.inference_mode()
def test_outlier_columns_lower_the_error(
    data: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    x, weight, bias = data
    exact = x @ weight.T + bias
    static = error(int8(weight, bias, outlier_columns=OUTLIERS)(x), exact)
    dynamic = error(int8(weight, bias, threshold=6.0)(x), exact)
    plain = error(int8(weight, bias)(x), exact)
    assert max(static, dynamic) < plain / 2
    assert static < 0.005


@torch.inference_mode()
def test_only_the_dynamic_threshold_lets_rows_change_each_other(
    data: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    x, weight, bias = data
    louder = x.clone()
    louder[1:] *= 1000
    static = int8(weight, bias, outlier_columns=OUTLIERS)
    assert torch.equal(static(louder)[0], static(x)[0])
    assert torch.equal(static(x[7:9])[1], static(x)[8])
    dynamic = int8(weight, bias, threshold=6.0)
    assert not torch.equal(dynamic(louder)[0], dynamic(x)[0])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_output_has_the_inputs_type_and_shape(
    data: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    x, weight, bias = data
    out = int8(weight, bias, outlier_columns=OUTLIERS)(x.to(dtype)[None])
    assert (out.shape, out.dtype) == ((1, 20, 48), dtype)


def test_damaged_weights_and_columns_are_refused(
    data: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    _, weight, bias = data
    weight[1, 2] = torch.nan
    with pytest.raises(EngineError, match="NaN or infinity"):
        int8(weight, bias)
    with pytest.raises(EngineError, match=r"0\.\.160"):
        int8(weight, bias, outlier_columns=(160, 0))


@torch.inference_mode()
def test_nf4_is_double_quantized(
    data: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    x, weight, bias = data
    layer = BitsAndBytesNf4Linear(160, 48, PLACE)
    layer.fill(weight)
    layer.fill_bias(bias)
    assert layer.inner is not None
    state = layer.inner.weight.quant_state
    assert (state.quant_type, state.nested) == ("nf4", True)
    assert error(layer(x), x @ weight.T + bias) < 0.15
