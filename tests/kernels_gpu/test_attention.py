"""Paged attention agrees with the reference."""

import pytest
import torch
from hypothesis import given, settings
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


@settings(max_examples=7)
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


@pytest.mark.parametrize(
    ("dim", "kv_heads", "group", "kind"),
    [
        (64, 3, 1, "int8"),
        (64, 1, 8, "int4"),
        (80, 2, 4, "int8"),
        (96, 1, 3, "int4"),
        (96, 2, 1, "float32"),
        (128, 2, 7, "int8"),
        (128, 1, 4, "int4"),
    ],
)
def test_head_sizes_and_groups_at_the_edges_of_blocks(dim, kv_heads, group, kind):
    shape = Shape(kv_heads * group, kv_heads, dim, block_size=8, kind=kind)
    contexts = [7, 8, 9, 31, 32, 33]
    paged = fill(shape, contexts, seed=dim + group)
    which = list(range(len(contexts)))
    lengths = [(1, 7), (8, 8), (1, 9), (1, 31), (9, 32), (2, 33)]
    q, layout = paged.query(which, lengths), paged.layout(which, lengths)
    assert [sorted(table) for table in paged.tables] != list(paged.tables)
    torch.testing.assert_close(
        attend(q, paged.layer, layout),
        expect(q, paged.layer, layout),
        rtol=0,
        atol=TOLERANCE,
    )


def test_more_heads_in_a_group_than_rows_in_a_tile():
    shape = Shape(heads=21, kv_heads=1, dim=8, block_size=8, kind="int8")
    paged = fill(shape, [37, 9], seed=6)
    lengths = [(1, 37), (4, 9)]
    q, layout = paged.query([0, 1], lengths), paged.layout([0, 1], lengths)
    actual = attend(q, paged.layer, layout)
    torch.testing.assert_close(
        actual, expect(q, paged.layer, layout), rtol=0, atol=TOLERANCE
    )


def test_default_tiles_on_a_context_of_several_splits():
    shape = Shape(heads=2, kv_heads=1, dim=64, block_size=8, kind="int8")
    paged = fill(shape, [1100], seed=7)
    for step in ([(1, 1100)], [(3, 1100)]):
        q, layout = paged.query([0], step), paged.layout([0], step)
        actual = attend(q, paged.layer, layout, tiling=Tiling())
        expected = expect(q, paged.layer, layout)
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_queries(dtype):
    shape = Shape(heads=4, kv_heads=2, dim=80, block_size=8, kind="int8")
    paged = fill(shape, [45, 20], seed=8)
    lengths = [(1, 45), (9, 20)]
    q = paged.query([0, 1], lengths).to(dtype)
    layout = paged.layout([0, 1], lengths)
    actual = attend(q, paged.layer, layout)
    assert actual.dtype == dtype
    expected = expect(q.float(), paged.layer, layout)
    torch.testing.assert_close(actual.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["int8", "int4", "float32"])
def test_a_bad_value_reaches_only_the_queries_that_see_it(kind):
    shape = Shape(heads=2, kv_heads=1, dim=8, block_size=4, kind=kind)
    paged = fill(shape, [12, 12], seed=9)
    block = paged.tables[0][5 // 4]
    broken = paged.layer.v if kind == "float32" else paged.layer.v_scale
    broken[block, 0, 5 % 4] = float("nan")
    lengths = [(12, 12), (12, 12)]
    q, layout = paged.query([0, 1], lengths), paged.layout([0, 1], lengths)
    actual = attend(q, paged.layer, layout)
    expected = expect(q, paged.layer, layout)
    assert expected[5:12].isnan().all()
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE, equal_nan=True)


def test_a_sequence_without_queries_is_passed_over():
    shape = Shape(heads=2, kv_heads=1, dim=8, block_size=4, kind="int8")
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
    shape = Shape(heads=1, kv_heads=1, dim=8, block_size=4, kind="int8")
    paged = fill(shape, [9, 11], seed=11)
    layout = to_device(paged.layout([0, 1], [(1, 9), (5, 11)]), DEVICE)
    assert isinstance(layout, DeviceLayout)
    assert (layout.max_query, layout.max_context) == (5, 11)
    assert to_device(layout, DEVICE) is layout
