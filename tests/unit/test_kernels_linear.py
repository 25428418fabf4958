"""The quantized linear layer: exactness, independence of rows, damaged input."""

from collections.abc import Iterator

import pytest
import torch
from support.kernel_cases import COMPILED, backend_named

from tokenmill.shared.errors import EngineError
from tokenmill.workers.engine.kernels import ops, reference
from tokenmill.workers.engine.kernels.backends import Backend

ALL = ("reference", *COMPILED)


@pytest.fixture(params=ALL)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with backend_named(request.param) as opened:
        yield opened


def test_int16_activations_are_close_to_float(backend: Backend) -> None:
    torch.manual_seed(0)
    q, scale = reference.quantize_channels(torch.randn(96, 576))
    w = q.float() * scale[:, None]  # so that only the activations are quantized
    x = torch.randn(5, 576) * torch.tensor([1e-6, 1e-2, 1.0, 1e3, 1e6])[:, None]
    y = backend.linear(x, backend.quantize_weight(w, activations="int16"), None)
    error = (y - x @ w.T).abs().amax(dim=1) / (x @ w.T).abs().amax(dim=1)
    assert float(error.max()) < 1e-4


@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_row_alone_equals_row_among_others(backend: Backend, activations: str) -> None:
    torch.manual_seed(1)
    weight = backend.quantize_weight(torch.randn(100, 1537), activations=activations)
    bias = torch.randn(100)
    x = torch.randn(37, 1537) * torch.rand(37, 1) * 100
    together = backend.linear(x, weight, bias)
    for row in (0, 5, 6, 36):
        alone = backend.linear(x[row : row + 1].contiguous(), weight, bias)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_damaged_row_is_nan_and_alone(
    backend: Backend, activations: str, bad: float
) -> None:
    torch.manual_seed(2)
    weight = backend.quantize_weight(torch.randn(33, 70), activations=activations)
    x = torch.randn(9, 70)
    clean = backend.linear(x, weight, None)
    x[4, 69] = bad
    y = backend.linear(x, weight, None)
    assert bool(y[4].isnan().all())
    keep = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(y[keep], clean[keep])


def test_extreme_rows(backend: Backend) -> None:
    w = torch.full((17, 1030), 1.0)
    w[0] = -1.0
    x = torch.zeros(6, 1030)
    x[1] = -0.0
    x[2, 3] = 3e38  # a single huge value
    x[3] = 1e-42  # denormals count as zero
    x[4] = 1.0  # the largest sums that a block can reach
    x[5] = -1.0
    y = backend.linear(x, backend.quantize_weight(w, activations="int16"), None)
    expected = x.double() @ w.double().T
    assert torch.equal(y[:2], torch.zeros(2, 17))
    assert torch.equal(y[3], torch.zeros(17))
    assert torch.allclose(y[2].double(), expected[2], rtol=1e-6)
    assert torch.allclose(y[4:].double(), expected[4:], rtol=1e-6)


@pytest.mark.parametrize("name", COMPILED)
def test_strided_rows_and_zero_weights(name: str) -> None:
    torch.manual_seed(3)
    wide = torch.randn(7, 200)
    w = torch.randn(20, 64)
    w[3] = 0.0
    with backend_named(name) as backend:
        y = backend.linear(
            wide[:, 100:164], backend.quantize_weight(w, activations="int16"), None
        )
    assert torch.equal(
        y, reference.linear(wide[:, 100:164], reference.quantize_weight(w))
    )
    assert torch.equal(y[:, 3], torch.zeros(7))


def test_no_rows(backend: Backend) -> None:
    weight = backend.quantize_weight(torch.randn(32, 64), activations="int16")
    assert backend.linear(torch.zeros(0, 64), weight, None).shape == (0, 32)


def test_ops_refuse_wrong_shapes() -> None:
    weight = ops.quantize_weight(torch.randn(4, 8))
    with pytest.raises(EngineError, match="expected float32"):
        ops.linear(torch.randn(2, 9), weight)
    with pytest.raises(EngineError, match="expected float32"):
        ops.linear(torch.randn(2, 8).double(), weight)
    with pytest.raises(EngineError, match="NaN or infinity"):
        ops.quantize_weight(torch.full((2, 2), float("nan")))
    with pytest.raises(EngineError, match="activations 'int4'"):
        ops.quantize_weight(torch.randn(2, 2), activations="int4")
