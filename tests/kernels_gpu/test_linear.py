"""Linear layers on integers: the reference's bits, rows apart from each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE

from tokenmill.shared.errors import EngineError
from tokenmill.workers.engine.kernels import reference
from tokenmill.workers.engine.kernels.triton.linear import int8_matmul, rescale
from tokenmill.workers.engine.kernels.triton.ops import TritonOps


def draw(seed, *sizes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


@given(
    rows=st.integers(1, 20),
    inner=st.sampled_from([1, 30, 64, 513, 1100]),
    columns=st.sampled_from([1, 33, 64, 70]),
    activations=st.sampled_from(["int8", "int16"]),
    with_bias=st.booleans(),
    seed=st.integers(0, 999),
)
def test_equals_the_reference(rows, inner, columns, activations, with_bias, seed):
    x, w, b = draw(seed, (rows, inner), (columns, inner), (columns,))
    x[0, 0] = 40.0
    bias = b if with_bias else None
    ops = TritonOps(DEVICE)
    actual = ops.linear(
        x.to(DEVICE),
        ops.quantize_weight(w, activations=activations),
        None if bias is None else bias.to(DEVICE),
    )
    expected = reference.linear(
        x, reference.quantize_weight(w, activations=activations), bias
    )
    assert torch.equal(actual.cpu(), expected)


def test_the_largest_sums_do_not_overflow():
    x, w = torch.full((2, 1024), 5.0), torch.full((3, 1024), -2.0)
    x[1] *= -1
    ops = TritonOps(DEVICE)
    y = ops.linear(x.to(DEVICE), ops.quantize_weight(w, activations="int16"))
    expected = reference.linear(x, reference.quantize_weight(w, activations="int16"))
    assert torch.equal(y.cpu(), expected)
    assert expected[0, 0] == pytest.approx(-10240.0, rel=1e-6)


@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_a_row_alone_gives_the_bits_it_gives_in_a_batch(activations):
    x, w = draw(1, (70, 96), (40, 96))
    x[5, 2] = float("nan")
    x = x.to(DEVICE)
    ops = TritonOps(DEVICE)
    weight = ops.quantize_weight(w, activations=activations)
    together = ops.linear(x, weight)
    assert together[5].isnan().all()
    for row in (0, 17, 69):
        assert torch.equal(ops.linear(x[row : row + 1], weight)[0], together[row])


def test_half_precision_input_gives_half_precision_output():
    x, w = draw(2, (3, 64), (32, 64))
    ops = TritonOps(DEVICE)
    y = ops.linear(x.half().to(DEVICE), ops.quantize_weight(w))
    expected = reference.linear(x.half().float(), reference.quantize_weight(w))
    assert torch.equal(y.cpu(), expected.half())


def test_int8_product_is_exact():
    generator = torch.Generator().manual_seed(3)
    a, b = (
        torch.randint(-127, 128, size, dtype=torch.int8, generator=generator)
        for size in ((19, 700), (65, 700))
    )
    product = int8_matmul(a.to(DEVICE), b.to(DEVICE))
    assert torch.equal(product.cpu().long(), a.long() @ b.long().T)


def test_rescale_adds_outliers_in_their_order():
    x, weight, x_scale, w_scale, bias = draw(4, (3, 9), (2, 70), (3,), (70,), (70,))
    products = torch.arange(210, dtype=torch.int32).reshape(3, 70)
    tensors = [t.to(DEVICE) for t in (products, x, x_scale, w_scale)]
    columns = torch.tensor([7, 2])
    actual = rescale(
        *tensors,
        bias=bias.to(DEVICE),
        outlier_columns=columns.to(DEVICE),
        outlier_weight=weight.to(DEVICE),
    )
    expected = products.float() * w_scale * x_scale[:, None]
    for index, column in enumerate(columns):
        expected = expected + x[:, column, None] * weight[index]
    assert torch.equal(actual.cpu(), expected + bias)


def test_no_rows():
    ops = TritonOps(DEVICE)
    weight = ops.quantize_weight(torch.ones(5, 8))
    assert ops.linear(torch.zeros(0, 8, device=DEVICE), weight).shape == (0, 5)


def test_errors_name_what_was_expected():
    ops = TritonOps(DEVICE)
    weight = ops.quantize_weight(torch.ones(5, 8))
    with pytest.raises(EngineError, match=r"expected \[tokens, 8\]"):
        ops.linear(torch.zeros(2, 9, device=DEVICE), weight)
    with pytest.raises(EngineError, match="expected 'triton'"):
        ops.linear(torch.zeros(2, 8), reference.quantize_weight(torch.ones(5, 8)))
    with pytest.raises(EngineError, match="NaN or infinity"):
        ops.quantize_weight(torch.full((2, 2), float("nan")))
    with pytest.raises(EngineError, match="int4"):
        ops.quantize_weight(torch.ones(2, 2), activations="int4")
