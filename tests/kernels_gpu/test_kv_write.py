"""Quantize on write: the reference's bits in the right slots, nothing elsewhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, Shape, fill, on_device, shapes, steps

from tokenmill.workers.engine.kernels import reference
from tokenmill.workers.engine.kernels.layout import KVLayer
from tokenmill.workers.engine.kernels.triton.kv_write import kv_write
from tokenmill.workers.engine.kernels.triton.layout import to_device


def tensors(layer: KVLayer) -> list[torch.Tensor]:
    found = [layer.k, layer.v, layer.k_scale, layer.v_scale]
    return [t.cpu() for t in found if t is not None]


def assert_writes_as_reference(shape, lengths, k, v):
    paged = fill(shape, [context for _, context in lengths], seed=1)
    layout = paged.layout(list(range(len(lengths))), lengths)
    device_layer = on_device(KVLayer(*_copies(paged.layer)))
    kv_write(k.to(DEVICE), v.to(DEVICE), device_layer, to_device(layout, DEVICE))
    reference.kv_write(k.float(), v.float(), paged.layer, layout)
    for actual, expected in zip(
        tensors(device_layer), tensors(paged.layer), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def _copies(layer):
    return (
        None if t is None else t.clone()
        for t in (layer.k, layer.v, layer.k_scale, layer.v_scale)
    )


def values(shape, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    size = (tokens, shape.kv_heads, shape.dim)
    spread = 10.0 ** torch.randint(-3, 3, size[:2], generator=generator)[..., None]
    return (torch.randn(size, generator=generator) * spread for _ in range(2))


@settings(max_examples=8)
@given(shape=shapes(), lengths=steps(), seed=st.integers(0, 999))
def test_equals_the_reference(shape, lengths, seed):
    k, v = values(shape, sum(count for count, _ in lengths), seed)
    assert_writes_as_reference(shape, lengths, k, v)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_vectors_without_usable_values(kind):
    shape = Shape(heads=2, kv_heads=2, dim=20, block_size=4, kind=kind)
    k, v = values(shape, 5, seed=2)
    k[0, 1] = 0
    k[1, 0, 3] = float("nan")
    v[2, 1, 0] = float("inf")
    v[3] = 1e-36
    assert_writes_as_reference(shape, [(5, 9)], k, v)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_half_precision_and_strided_inputs(kind):
    shape = Shape(heads=3, kv_heads=3, dim=16, block_size=8, kind=kind)
    fused = torch.randn(4, 3 * 3 * 16, generator=torch.Generator().manual_seed(5))
    k, v = (fused[:, i * 48 : (i + 1) * 48].view(4, 3, 16) for i in (1, 2))
    assert not k.is_contiguous()
    assert_writes_as_reference(shape, [(4, 11)], k, v)
    assert_writes_as_reference(shape, [(4, 11)], k.half(), v.half())
