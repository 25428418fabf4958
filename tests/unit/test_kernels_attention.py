"""KV writes and paged attention: against the reference, invariance, damaged input."""

from collections.abc import Iterator

import pytest
import torch
from support.kernel_cases import (
    COMPILED,
    KINDS,
    backend_named,
    filled_layer,
    make_layout,
    tables_of,
)

from tokenmill.shared.errors import EngineError
from tokenmill.workers.engine.kernels import ops, reference
from tokenmill.workers.engine.kernels.backends import Backend
from tokenmill.workers.engine.kernels.layout import KVKind, KVLayer, StepLayout

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_agrees_with_the_reference(
    backend: Backend, kind: KVKind, variant: str
) -> None:
    torch.manual_seed(0)
    layer = filled_layer(2, 64, 8, 64, kind=kind, seed=1)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_chunk_and_prefill_give_the_same_bits(
    backend: Backend, kind: KVKind, variant: str
) -> None:
    torch.manual_seed(1)
    length = 75
    layer = filled_layer(3, 20, 8, 64, kind=kind, seed=2)
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


@pytest.mark.parametrize("kind", KINDS)
def test_damage_stays_in_its_sequence(backend: Backend, kind: KVKind) -> None:
    torch.manual_seed(2)
    layer = filled_layer(1, 16, 4, 32, kind=kind, seed=3)
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


def bits(tensor: torch.Tensor | None) -> torch.Tensor:
    """Returns memory as integers, so that NaN equals itself."""
    assert tensor is not None
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    )


def assert_same_store(ours: KVLayer, theirs: KVLayer) -> None:
    assert torch.equal(bits(ours.k), bits(theirs.k))
    assert torch.equal(bits(ours.v), bits(theirs.v))
    if theirs.k_scale is not None:
        assert torch.equal(bits(ours.k_scale), bits(theirs.k_scale))
        assert torch.equal(bits(ours.v_scale), bits(theirs.v_scale))


@pytest.mark.parametrize("dim", [20, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_kv_write_bits(backend: Backend, kind: KVKind, dim: int) -> None:
    torch.manual_seed(3)
    values = torch.randn(40, 3, dim) * torch.rand(40, 3, 1) * 50
    values[0] = 0.0
    values[1] = -0.0
    values[2, 0, 4] = 3.4e38
    values[3] = 1e-42
    values[4, 1, 19] = float("nan")
    values[5, 2, 0] = -float("inf")
    values[6, :, 1], values[6, :, 2] = -77.0, 77.0  # which of two extremes
    values[7] = values[7].round()
    layout = make_layout([(40, 40)], 8, 9)
    ours, theirs = (KVLayer.allocate(9, 3, 8, dim, kind=kind) for _ in range(2))
    backend.kv_write(values, values.flip(0), ours, layout)
    reference.kv_write(values, values.flip(0), theirs, layout)
    assert_same_store(ours, theirs)
    if kind != "float32":
        damaged = bits(theirs.k_scale).shape[3:].numel() * 2
        assert theirs.k_scale is not None
        assert int(theirs.k_scale.isnan().sum()) == damaged


def test_int4_error_is_within_half_a_level() -> None:
    torch.manual_seed(5)
    x = torch.randn(50, 2, 40) * torch.tensor([1e-3, 30.0])[None, :, None]
    x[:, :, 3] = 500.0  # an outlier spoils its own group only
    q, scale = reference.kv_quantize_int4(x)
    error = (reference.kv_floats(q, scale) - x.double()).abs()
    spread = scale.double().abs().repeat_interleave(16, dim=-1)[..., :40]
    # The far end of the range, 8 levels away, has only 7: it may miss by a whole one,
    # and bfloat16 moves the extreme by 1/256 of 8 levels.
    assert bool((error <= 1.04 * spread).all())
    assert float((error <= 0.501 * spread).double().mean()) > 0.9
    assert float(error[:, 1, 16:].max()) < 30.0


def test_int4_refuses_an_odd_head() -> None:
    with pytest.raises(EngineError, match="even head size"):
        KVLayer.allocate(1, 1, 8, 15, kind="int4")


def test_strided_heads_of_a_fused_projection(backend: Backend) -> None:
    torch.manual_seed(4)
    fused = torch.randn(10, 10, 16)  # 6 query heads, 2 key heads, 2 value heads
    layout = make_layout([(10, 10)], 8, 4)
    views, copies = (KVLayer.allocate(4, 2, 8, 16, kind="int8") for _ in range(2))
    q, k, v = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    backend.kv_write(k, v, views, layout)
    reference.kv_write(k.contiguous(), v.contiguous(), copies, layout)
    assert torch.equal(views.k, copies.k)
    assert torch.equal(
        attend(backend, q, views, layout),
        attend(backend, q.contiguous(), copies, layout),
    )


def test_ops_refuse_wrong_shapes() -> None:
    layer = KVLayer.allocate(4, 2, 8, 16, kind="int8")
    layout = make_layout([(3, 3)], 8, 4)
    with pytest.raises(EngineError, match=r"expected \[3, 2, 16\]"):
        ops.kv_write(torch.zeros(3, 2, 8), torch.zeros(3, 2, 8), layer, layout)
    with pytest.raises(EngineError, match="multiple of 2"):
        ops.paged_attention(torch.zeros(3, 3, 16), layer, layout, scale=1.0)
