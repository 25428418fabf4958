"""Random shapes of linear layers: every compiled backend against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import COMPILED, backend_named

from tokenmill.workers.engine.kernels import reference

RUNS = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("name", COMPILED)
def test_linear_has_the_bits_of_the_reference(name: str) -> None:
    with backend_named(name) as backend:

        @RUNS
        @given(
            rows=st.integers(1, 40),
            outputs=st.integers(1, 70),
            inputs=st.integers(1, 1100),
            activations=st.sampled_from(["int16", "int8"]),
            with_bias=st.booleans(),
            seed=st.integers(0, 2**31),
        )
        def check(
            rows: int,
            outputs: int,
            inputs: int,
            activations: str,
            with_bias: bool,
            seed: int,
        ) -> None:
            torch.manual_seed(seed)
            x = torch.randn(rows, inputs) * torch.rand(rows, 1) ** 8 * 1e4
            w = torch.randn(outputs, inputs)
            bias = torch.randn(outputs) if with_bias else None
            got = backend.linear(
                x, backend.quantize_weight(w, activations=activations), bias
            )
            expected = reference.linear(
                x, reference.quantize_weight(w, activations=activations), bias
            )
            assert torch.equal(got, expected)

        check()
