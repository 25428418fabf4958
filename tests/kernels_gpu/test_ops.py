"""The GPU's operations answer the same calls as the CPU's."""

import inspect

import pytest
import torch
from kernel_cases import DEVICE, SMALL, Shape, fill, on_device

from tokenmill.shared.errors import EngineError
from tokenmill.workers.engine.kernels import ops as cpu_ops
from tokenmill.workers.engine.kernels import reference
from tokenmill.workers.engine.kernels.protocol import OpsProtocol
from tokenmill.workers.engine.kernels.triton.layout import to_device
from tokenmill.workers.engine.kernels.triton.ops import TritonOps

CALLS = [
    name for name in vars(OpsProtocol) if callable(getattr(OpsProtocol, name))
    and not name.startswith("_")
]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("implementation", [cpu_ops, TritonOps(DEVICE)])
def test_both_sides_take_the_same_arguments(implementation, name):
    wanted = inspect.signature(getattr(OpsProtocol, name)).parameters
    given = inspect.signature(getattr(implementation, name)).parameters
    assert [
        (p.name, p.kind, p.default) for p in wanted.values() if p.name != "self"
    ] == [(p.name, p.kind, p.default) for p in given.values()]


def test_write_then_attend_through_the_object():
    shape = Shape(heads=4, kv_heads=2, dim=16, block_size=8, kind="int8")
    lengths = [(5, 12), (1, 20)]
    paged = fill(shape, [12, 20], seed=1)
    layout = paged.layout([0, 1], lengths)
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(6, 2, 16, generator=generator) for _ in range(2))
    ops: OpsProtocol = TritonOps(DEVICE, tiling=SMALL)
    layer, device_layout = on_device(paged.layer), to_device(layout, DEVICE)
    ops.kv_write(k.to(DEVICE), v.to(DEVICE), layer, device_layout)
    q = paged.query([0, 1], lengths)
    actual = ops.paged_attention(q.to(DEVICE), layer, device_layout, scale=0.25)
    reference.kv_write(k, v, paged.layer, layout)
    expected = reference.paged_attention(q, paged.layer, layout, scale=0.25)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=1e-5)


def test_wrong_shapes_are_refused():
    shape = Shape(heads=4, kv_heads=2, dim=16, block_size=8, kind="int8")
    paged = fill(shape, [4], seed=1)
    layout = to_device(paged.layout([0], [(4, 4)]), DEVICE)
    layer, ops = on_device(paged.layer), TritonOps(DEVICE)
    good = torch.zeros(4, 2, 16, device=DEVICE)
    with pytest.raises(EngineError, match=r"v is \[4, 2, 8\]; expected \[4, 2, 16\]"):
        ops.kv_write(good, good[..., :8], layer, layout)
    with pytest.raises(EngineError, match="a multiple of 2"):
        ops.paged_attention(good[:, :1], layer, layout, scale=1.0)


def test_the_report_names_version_and_device():
    report = TritonOps(DEVICE).backend_report()
    assert report["backend"].startswith("triton 3.")
    assert DEVICE in report["reason"]
