"""KV writes and paged attention: against the reference, invariance, damaged input."""

from collections.abc import Iterator

import pytest
import torch
from support.kernel_cases import (
    COMPILED,
    backend_named,
    filled_layer,
    make_layout,
    tables_of,
)

from tokenmill.shared.errors import EngineError
from tokenmill.workers.engine.kernels import ops, reference
from tokenmill.workers.engine.kernels.backends import Backend
from tokenmill.workers.engine.kernels.layout import KVLayer, StepLayout

ALIBI = (torch.linspace(0.01, 0.5, 6)[:, None] * torch.arange(90)).bfloat16().float()
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"window": 17},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": ALIBI},
    "all": {
        "window": 33,
        "softcap": 5.0,
        "alibi": ALIBI,
    },
}


@pytest.fixture(params=COMPILED)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with backend_named(request.param) as opened:
        yield opened


def attend(
    backend: Backend, q: torch.Tensor, layer: KVLayer, layout: StepLayout, **how: object
) -> torch.Tensor:
    options = {"window": None, "alibi": None, "softcap": None, **how}
    return backend.paged_attention(
        q,
        layer,
        layout,
        scale=q.shape[2] ** -0.5,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_agrees_with_the_reference(backend: Backend, int8: bool, variant: str) -> None:
    torch.manual_seed(0)
    layer = filled_layer(2, 64, 8, 64, int8=int8, seed=1)
    layout = make_layout([(1, 77), (50, 50), (20, 90), (1, 1)], 8, 64)
    q = torch.randn(72, 6, 64)
    got = attend(backend, q, layer, layout, **VARIANTS[variant])
    expected = reference.paged_attention(
        q,
        layer,
        layout,
        scale=64**-0.5,
        **VARIANTS[variant],  # type: ignore[arg-type]
    )
    assert float((got - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_chunk_and_prefill_give_the_same_bits(
    backend: Backend, int8: bool, variant: str
) -> None:
    torch.manual_seed(1)
    length = 75
    layer = filled_layer(3, 20, 8, 64, int8=int8, seed=2)
    whole = make_layout([(length, length)], 8, 64)
    table = tables_of(whole)
    q = torch.randn(length, 6, 20)
    full = attend(backend, q, layer, whole, **VARIANTS[variant])
    for first, end in ((0, 1), (0, 31), (31, 66), (40, 41), (66, 75), (74, 75)):
        neighbour = [5, 9, 2]  # another sequence in the same step
        layout = make_layout(
            [(3, 19), (end - first, end)], 8, 64, tables=[neighbour, table[0]]
        )
        packed = torch.cat((torch.randn(3, 6, 20), q[first:end]))
        piece = attend(backend, packed, layer, layout, **VARIANTS[variant])
        assert torch.equal(piece[3:], full[first:end]), (first, end)


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
def test_damage_stays_in_its_sequence(backend: Backend, int8: bool) -> None:
    torch.manual_seed(2)
    layer = filled_layer(1, 16, 4, 32, int8=int8, seed=3)
    layout = make_layout([(3, 9), (4, 6), (1, 12)], 4, 32)
    q = torch.randn(8, 2, 16)
    k, v = torch.randn(8, 1, 16), torch.randn(8, 1, 16)
    backend.kv_write(k, v, layer, layout)
    clean = attend(backend, q, layer, layout)
    k[5, 0, 3], v[5, 0, 0] = float("nan"), float("inf")  # third query of sequence 1
    backend.kv_write(k, v, layer, layout)
    damaged = attend(backend, q, layer, layout)
    assert bool(damaged[5:7].isnan().any(dim=-1).all())
    rest = [0, 1, 2, 3, 4, 7]
    assert torch.equal(damaged[rest], clean[rest])
    q[7] = float("nan")
    again = attend(backend, q, layer, layout)
    assert bool(again[7].isnan().all())
    assert torch.equal(again[:5], clean[:5])


def test_kv_write_bits(backend: Backend) -> None:
    torch.manual_seed(3)
    values = torch.randn(40, 3, 20) * torch.rand(40, 3, 1) * 50
    values[0] = 0.0
    values[1] = -0.0
    values[2, 0, 4] = 3e38
    values[3] = 1e-42
    values[4, 1, 19] = float("nan")
    values[5, 2, 0] = -float("inf")
    layout = make_layout([(40, 40)], 8, 9)
    ours, theirs = (KVLayer.allocate(9, 3, 8, 20, int8=True) for _ in range(2))
    backend.kv_write(values, values.flip(0), ours, layout)
    reference.kv_write(values, values.flip(0), theirs, layout)
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)
    assert ours.k_scale is not None
    assert theirs.k_scale is not None
    assert torch.equal(ours.k_scale.nan_to_num(-1), theirs.k_scale.nan_to_num(-1))
    assert int(ours.k_scale.isnan().sum()) == 2


def test_strided_heads_of_a_fused_projection(backend: Backend) -> None:
    torch.manual_seed(4)
    fused = torch.randn(10, 10, 16)  # 6 query heads, 2 key heads, 2 value heads
    layout = make_layout([(10, 10)], 8, 4)
    views, copies = (KVLayer.allocate(4, 2, 8, 16, int8=True) for _ in range(2))
    q, k, v = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    backend.kv_write(k, v, views, layout)
    reference.kv_write(k.contiguous(), v.contiguous(), copies, layout)
    assert torch.equal(views.k, copies.k)
    assert torch.equal(
        attend(backend, q, views, layout),
        attend(backend, q.contiguous(), copies, layout),
    )


def test_ops_refuse_wrong_shapes() -> None:
    layer = KVLayer.allocate(4, 2, 8, 16, int8=True)
    layout = make_layout([(3, 3)], 8, 4)
    with pytest.raises(EngineError, match=r"expected \[3, 2, 16\]"):
        ops.kv_write(torch.zeros(3, 2, 8), torch.zeros(3, 2, 8), layer, layout)
    with pytest.raises(EngineError, match="multiple of 2"):
        ops.paged_attention(torch.zeros(3, 3, 16), layer, layout, scale=1.0)
