"""Row quantization: the reference's bits, whatever the values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE

from tokenmill.workers.engine.kernels import reference
from tokenmill.workers.engine.kernels.triton.quantize import quantize_rows


def assert_same_bits(x: torch.Tensor, activations: str) -> None:
    q, scale = quantize_rows(x.to(DEVICE), activations)
    expected_q, expected_scale = reference.quantize_rows(x.float(), activations)
    assert torch.equal(q.cpu().to(torch.int16), expected_q)
    torch.testing.assert_close(
        scale.cpu(), expected_scale, rtol=0, atol=0, equal_nan=True
    )


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-30, 30),
    activations=st.sampled_from(["int8", "int16"]),
    half=st.booleans(),
)
def test_equals_the_reference(rows, columns, seed, exponent, activations, half):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x = x.half() if half else x * 2.0**exponent
    assert_same_bits(x, activations)


@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_ties_go_to_the_even_integer(activations):
    levels = reference.LEVELS[activations]
    halves = torch.arange(-20, 20).float() + 0.5
    x = torch.cat([halves, torch.tensor([float(levels)])])[None]
    q, _ = quantize_rows(x.to(DEVICE), activations)
    assert q[0, :-1].tolist() == [round(value) for value in halves.tolist()]


def test_rows_without_usable_values_touch_no_other_row():
    x = torch.ones(6, 40)
    x[0] = 0
    x[1, 7] = float("nan")
    x[2, 3] = float("-inf")
    x[3] = 1e-33
    x[4, 0] = 3e38
    for activations in ("int8", "int16"):
        assert_same_bits(x, activations)


def test_columns_beyond_one_pass_and_strided_rows():
    wide = torch.randn(2, 9000, generator=torch.Generator().manual_seed(3))
    assert_same_bits(wide, "int16")
    assert_same_bits(wide[:, 100:400], "int8")
    assert_same_bits(wide.t()[:7], "int8")


def test_no_rows():
    q, scale = quantize_rows(torch.zeros(0, 8, device=DEVICE), "int8")
    assert q.shape == (0, 8)
    assert scale.shape == (0,)
