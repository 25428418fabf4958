"""A token's attention has the same bits whatever it is computed with."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Shape, attend, fill, shapes, steps


@pytest.mark.usefixtures("ordered_products")
@settings(max_examples=6)
@given(shape=shapes(), lengths=steps(), seed=st.integers(0, 999))
def test_a_sequence_alone_gives_the_bits_it_gives_in_a_batch(shape, lengths, seed):
    paged = fill(shape, [context for _, context in lengths], seed)
    which = list(range(len(lengths)))
    together = attend(
        paged.query(which, lengths), paged.layer, paged.layout(which, lengths)
    )
    start = 0
    for index, (count, context) in enumerate(lengths):
        step = [(count, context)]
        alone = attend(
            paged.query([index], step), paged.layer, paged.layout([index], step)
        )
        assert torch.equal(together[start : start + count], alone)
        start += count


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("window", [None, 15])
@pytest.mark.parametrize("kind", ["int8", "int4", "float32"])
def test_chunks_and_decode_give_the_bits_of_one_prefill(kind, window):
    shape = Shape(heads=3, kv_heads=1, dim=12, block_size=8, kind=kind)
    context = 40
    paged = fill(shape, [context], seed=4)

    def positions(first, last):
        step = [(last - first, last)]
        q, layout = paged.query([0], step), paged.layout([0], step)
        return attend(q, paged.layer, layout, window=window)

    whole = positions(0, context)
    chunks = torch.cat([positions(0, 13), positions(13, 33), positions(33, 40)])
    assert torch.equal(whole, chunks)
    for last in (1, 32, 33, 40):
        assert torch.equal(whole[last - 1 : last], positions(last - 1, last))
