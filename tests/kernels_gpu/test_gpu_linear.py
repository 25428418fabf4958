"""INT8 layers through the libraries: equal products, bounded error, rows apart."""

import pytest
import torch
from kernel_cases import DEVICE

from tokenmill.shared.errors import EngineError
from tokenmill.workers.engine.kernels import reference
from tokenmill.workers.engine.model.gpu import int8
from tokenmill.workers.engine.model.gpu.device_linear import Place
from tokenmill.workers.engine.model.gpu.int8 import DeviceInt8Linear, WideInt8Linear
from tokenmill.workers.engine.model.gpu.linear import (
    CANDIDATES,
    MeasuredMatmul,
    gpu_ops,
)
from tokenmill.workers.engine.model.quantize import Int8Linear

OUTLIERS = [3, 40]


@pytest.fixture
def layer_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 160, generator=generator)
    x[:, OUTLIERS] *= 60
    weight = torch.randn(48, 160, generator=generator)
    return x, weight, torch.randn(48, generator=generator)


PLACE = Place(torch.device(DEVICE), torch.device(DEVICE), torch.float32)


def filled(layer, weight, bias):
    if bias is not None:
        layer.fill_bias(bias)
    layer.fill(weight)
    return layer


def make(weight, bias=None, *, matmul=None, outliers=()):
    layer = DeviceInt8Linear(
        weight.shape[1],
        weight.shape[0],
        PLACE,
        outlier_columns=outliers,
        matmul=matmul or MeasuredMatmul(),
    )
    return filled(layer, weight, bias)


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("name", sorted(CANDIDATES))
def test_every_library_gives_the_exact_product(name, rows):
    generator = torch.Generator().manual_seed(rows)
    a, b = (
        torch.randint(-127, 128, (count, 2048), dtype=torch.int8, generator=generator)
        for count in (rows, 24)
    )
    a[0], b[0] = 127, 127  # a sum beyond what float32 holds exactly
    product = CANDIDATES[name](a.to(DEVICE), b.to(DEVICE))
    assert product.dtype == torch.int32
    assert torch.equal(product.cpu().long(), a.long() @ b.long().T)


def test_the_error_is_that_of_rounding_rows_and_weights(layer_data):
    x, weight, bias = layer_data
    actual = make(weight, bias, outliers=OUTLIERS)(x.to(DEVICE)).cpu()
    kept, kept_weight = x.clone(), weight.clone()
    kept[:, OUTLIERS], kept_weight[:, OUTLIERS] = 0, 0
    row_step = kept.abs().amax(1, keepdim=True) / 254
    weight_step = kept_weight.abs().amax(1)[None] / 254
    bound = (
        row_step * kept_weight.abs().sum(1)
        + weight_step * kept.abs().sum(1, keepdim=True)
        + 160 * row_step * weight_step
    )
    assert ((actual - (x @ weight.T + bias)).abs() <= bound + 1e-4).all()


def test_outlier_columns_in_full_precision_lower_the_error(layer_data):
    x, weight, _ = layer_data
    exact = x @ weight.T

    def error(outliers):
        actual = make(weight, outliers=outliers)(x.to(DEVICE)).cpu()
        return float((actual - exact).norm() / exact.norm())

    assert error(OUTLIERS) < error([]) / 5


def test_a_row_does_not_depend_on_its_batch_mates(layer_data):
    x, weight, bias = layer_data
    layer = make(weight, bias, outliers=OUTLIERS)
    x = x.to(DEVICE)
    together = layer(x)
    louder = x.clone()
    louder[1:] *= 1000
    assert torch.equal(layer(x[:1])[0], together[0])
    assert torch.equal(layer(louder)[0], together[0])
    assert torch.equal(layer(x[7:9])[1], together[8])


def test_leading_dimensions_and_half_precision(layer_data):
    x, weight, bias = layer_data
    layer = make(weight, bias, outliers=OUTLIERS)
    packed = layer(x.to(DEVICE))
    assert torch.equal(layer(x.to(DEVICE)[None])[0], packed)
    half = layer(x.half().to(DEVICE))
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), packed, rtol=2e-2, atol=1.0)


def test_state_moves_with_the_module(layer_data):
    x, weight, bias = layer_data
    layer = make(weight, bias, outliers=OUTLIERS)
    other = make(torch.zeros_like(weight), torch.zeros_like(bias), outliers=[1, 2])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x.to(DEVICE)), layer(x.to(DEVICE)))


def test_sixteen_bit_rows_are_the_references(layer_data):
    x, weight, bias = layer_data
    layer = filled(WideInt8Linear(160, 48, PLACE, gpu_ops(DEVICE)), weight, bias)
    expected = reference.linear(x, reference.quantize_weight(weight), bias)
    assert torch.equal(layer(x.to(DEVICE)[None])[0].cpu(), expected)


def test_a_calibrated_layer_is_the_cpus(layer_data):
    x, weight, bias = layer_data
    mean = x.mean(0)
    for precise in (False, True):
        layer = WideInt8Linear(
            160, 48, PLACE, gpu_ops(DEVICE), mean=mean, precise=precise
        )
        host = Int8Linear(160, 48, mean=mean, precise=precise)
        for one in (layer, host):
            one.fill(weight)
            one.fill_bias(bias / 2)
            one.fill_bias(bias)  # a merged layer's comes again with each member
        actual, expected = layer(x.to(DEVICE)).cpu(), host(x)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-2)
        error = (actual - (x @ weight.T + bias)).abs().max()
        assert float(error) < (0.2 if precise else 3.0)


def test_the_correction_is_made_of_few_rows_at_a_time(layer_data, monkeypatch):
    x, weight, _ = layer_data
    mean = x.mean(0)
    sizes, double = [], torch.Tensor.double
    whole = filled(
        WideInt8Linear(160, 48, PLACE, gpu_ops(DEVICE), mean=mean), weight, None
    )
    monkeypatch.setattr(int8, "_ROWS_AT_ONCE", 10)
    monkeypatch.setattr(
        torch.Tensor, "double", lambda t: sizes.append(t.shape) or double(t)
    )
    parts = WideInt8Linear(160, 48, PLACE, gpu_ops(DEVICE), mean=mean)
    parts.fill(weight)
    assert max(shape[0] for shape in sizes if len(shape) == 2) == 10
    torch.testing.assert_close(parts.bias, whole.bias, rtol=1e-6, atol=1e-6)
    parts.settle()
    assert (parts._mean, parts._own_bias, parts._correction) == (None, None, None)
    assert parts.bias is not None


def test_ops_with_a_library_agree_with_the_reference(layer_data):
    x, weight, bias = layer_data
    ops = gpu_ops(DEVICE)
    for activations in ("int8", "int16"):
        actual = ops.linear(
            x.to(DEVICE),
            ops.quantize_weight(weight, activations=activations),
            bias.to(DEVICE),
        )
        expected = reference.linear(
            x, reference.quantize_weight(weight, activations=activations), bias
        )
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-6, atol=1e-3)


def test_a_damaged_weight_is_refused(layer_data):
    _, weight, _ = layer_data
    weight[2, 5] = float("inf")
    with pytest.raises(EngineError, match="NaN or infinity"):
        make(weight)


def test_a_column_that_does_not_exist_is_named():
    with pytest.raises(EngineError, match=r"-1\.\.9"):
        make(torch.ones(2, 4), outliers=[9, -1])


def test_a_measurement_covers_every_batch_size():
    matmul = MeasuredMatmul()
    weight = torch.ones(16, 32, dtype=torch.int8, device=DEVICE)
    matmul.prepare([weight], max_rows=20)
    if DEVICE == "cpu":
        assert matmul.report() == {}
        assert "not measured" in str(matmul)
    else:
        assert set(matmul.report()) == {f"{2**n}x32x16" for n in range(6)}
