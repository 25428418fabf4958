"""Paged attention agrees with the reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, Shape, attend, fill, shapes, steps

from tokenmill.workers.engine.kernels import reference
from tokenmill.workers.engine.kernels.triton.attention import Tiling
from tokenmill.workers.engine.kernels.triton.layout import DeviceLayout, to_device

TOLERANCE = 1e-5


def expect(q, layer, layout, **options):
    return reference.paged_attention(
        q, layer, layout, scale=q.shape[-1] ** -0.5, **options
    )


@given(
    shape=shapes(),
    lengths=steps(),
    seed=st.integers(0, 999),
    window=st.sampled_from([None, 1, 7, 40]),
    softcap=st.sampled_from([None, 0.7, 30.0]),
    alibi=st.booleans(),
)
def test_agrees_with_the_reference(shape, lengths, seed, window, softcap, alibi):
    paged = fill(shape, [context for _, context in lengths], seed)
    which = list(range(len(lengths)))
    q, layout = paged.query(which, lengths), paged.layout(which, lengths)
    slopes = 2.0 ** -torch.arange(1.0, shape.heads + 1)
    bias = (slopes[:, None] * torch.arange(70.0)).bfloat16().float() if alibi else None
    options = {"window": window, "softcap": softcap, "alibi": bias}
    actual = attend(q, paged.layer, layout, **options)
    expected = expect(q, paged.layer, layout, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def test_more_heads_in_a_group_than_rows_in_a_tile():
    shape = Shape(heads=21, kv_heads=1, dim=8, block_size=8, int8=True)
    paged = fill(shape, [37, 9], seed=6)
    lengths = [(1, 37), (4, 9)]
    q, layout = paged.query([0, 1], lengths), paged.layout([0, 1], lengths)
    actual = attend(q, paged.layer, layout)
    torch.testing.assert_close(
        actual, expect(q, paged.layer, layout), rtol=0, atol=TOLERANCE
    )


def test_default_tiles_on_a_context_of_several_splits():
    shape = Shape(heads=2, kv_heads=1, dim=64, block_size=8, int8=True)
    paged = fill(shape, [1100], seed=7)
    for step in ([(1, 1100)], [(3, 1100)]):
        q, layout = paged.query([0], step), paged.layout([0], step)
        actual = attend(q, paged.layer, layout, tiling=Tiling())
        expected = expect(q, paged.layer, layout)
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_queries(dtype):
    shape = Shape(heads=4, kv_heads=2, dim=80, block_size=8, int8=True)
    paged = fill(shape, [45, 20], seed=8)
    lengths = [(1, 45), (9, 20)]
    q = paged.query([0, 1], lengths).to(dtype)
    layout = paged.layout([0, 1], lengths)
    actual = attend(q, paged.layer, layout)
    assert actual.dtype == dtype
    expected = expect(q.float(), paged.layer, layout)
    torch.testing.assert_close(actual.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("int8", [True, False])
def test_a_bad_value_reaches_only_the_queries_that_see_it(int8):
    shape = Shape(heads=2, kv_heads=1, dim=8, block_size=4, int8=int8)
    paged = fill(shape, [12, 12], seed=9)
    block = paged.tables[0][5 // 4]
    broken = paged.layer.v if not int8 else paged.layer.v_scale
    broken[block, 0, 5 % 4] = float("nan")
    lengths = [(12, 12), (12, 12)]
    q, layout = paged.query([0, 1], lengths), paged.layout([0, 1], lengths)
    actual = attend(q, paged.layer, layout)
    expected = expect(q, paged.layer, layout)
    assert expected[5:12].isnan().all()
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE, equal_nan=True)


def test_a_sequence_without_queries_is_passed_over():
    shape = Shape(heads=2, kv_heads=1, dim=8, block_size=4, int8=True)
    paged = fill(shape, [9, 11, 6], seed=10)
    lengths = [(0, 9), (3, 11), (0, 6)]
    q, layout = paged.query([0, 1, 2], lengths), paged.layout([0, 1, 2], lengths)
    torch.testing.assert_close(
        attend(q, paged.layer, layout),
        expect(q, paged.layer, layout),
        rtol=0,
        atol=TOLERANCE,
    )


def test_the_layout_is_copied_to_the_device_once():
    shape = Shape(heads=1, kv_heads=1, dim=8, block_size=4, int8=True)
    paged = fill(shape, [9, 11], seed=11)
    layout = to_device(paged.layout([0, 1], [(1, 9), (5, 11)]), DEVICE)
    assert isinstance(layout, DeviceLayout)
    assert (layout.max_query, layout.max_context) == (5, 11)
    assert to_device(layout, DEVICE) is layout
