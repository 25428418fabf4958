"""Random shapes: every compiled backend against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import COMPILED, backend_named, make_layout

from tokenmill.workers.engine.kernels import reference
from tokenmill.workers.engine.kernels.layout import KVLayer

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


@pytest.mark.parametrize("name", COMPILED)
def test_attention_over_random_layouts(name: str) -> None:
    with backend_named(name) as backend:

        @RUNS
        @given(
            lengths=st.lists(
                st.tuples(st.integers(1, 50), st.integers(0, 60)),
                min_size=1,
                max_size=5,
            ),
            kv_heads=st.integers(1, 3),
            group=st.integers(1, 4),
            dim=st.sampled_from([4, 16, 20, 64, 72]),
            block_size=st.sampled_from([1, 3, 8, 16]),
            window=st.one_of(st.none(), st.integers(1, 70)),
            int8=st.booleans(),
            seed=st.integers(0, 2**31),
        )
        def check(
            lengths: list[tuple[int, int]],
            kv_heads: int,
            group: int,
            dim: int,
            block_size: int,
            window: int | None,
            int8: bool,
            seed: int,
        ) -> None:
            torch.manual_seed(seed)
            whole = [(new + old, new + old) for new, old in lengths]
            num_blocks = sum(-(-total // block_size) for _, total in whole) + 3
            layer = KVLayer.allocate(num_blocks, kv_heads, block_size, dim, int8=int8)
            every = make_layout(whole, block_size, num_blocks, seed=seed)
            tokens = len(every.positions)
            k, v = torch.randn(2, tokens, kv_heads, dim)
            backend.kv_write(k, v, layer, every)
            layout = make_layout(
                [(new, new + old) for new, old in lengths],
                block_size,
                num_blocks,
                seed=seed,
            )
            q = torch.randn(len(layout.positions), kv_heads * group, dim)
            got = backend.paged_attention(
                q,
                layer,
                layout,
                scale=dim**-0.5,
                window=window,
                alibi=None,
                softcap=None,
            )
            expected = reference.paged_attention(
                q, layer, layout, scale=dim**-0.5, window=window
            )
            assert float((got - expected).abs().max()) < 1e-5

        check()
