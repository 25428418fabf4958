"""The fused decoder layer and the small operations it is made of."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.kernel_cases import COMPILED, backend_named, make_layout

from tokenmill.workers.engine.kernels.backends import Backend, ReferenceBackend
from tokenmill.workers.engine.kernels.composed import Composed, LlamaLayerWeights
from tokenmill.workers.engine.kernels.layout import KVLayer, StepLayout

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 48, 76, 4, 2, 20


@pytest.fixture(params=COMPILED)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with backend_named(request.param) as opened:
        yield opened


def make_weights(backend: Backend, *, qwen: bool) -> LlamaLayerWeights:
    torch.manual_seed(0)

    def packed(n: int, k: int) -> object:
        return backend.quantize_weight(torch.randn(n, k) * k**-0.5, activations="int16")

    qkv_rows = (HEADS + 2 * KV_HEADS) * DIM
    layer = LlamaLayerWeights(
        attention_norm=torch.rand(HIDDEN) + 0.5,
        mlp_norm=torch.rand(HIDDEN) + 0.5,
        qkv=packed(qkv_rows, HIDDEN),  # type: ignore[arg-type]
        output=packed(HIDDEN, HEADS * DIM),  # type: ignore[arg-type]
        gate_up=packed(2 * INNER, HIDDEN),  # type: ignore[arg-type]
        down=packed(HIDDEN, INNER),  # type: ignore[arg-type]
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        epsilon=1e-5,
        scale=DIM**-0.5,
    )
    if not qwen:
        return layer
    return replace(
        layer,
        window=7,
        qkv_bias=torch.randn(qkv_rows),
        q_norm=torch.rand(DIM) + 0.5,
        k_norm=torch.rand(DIM) + 0.5,
    )


def rotation(layout: StepLayout) -> tuple[torch.Tensor, torch.Tensor]:
    angles = layout.positions[:, None] * torch.rand(
        DIM // 2, generator=torch.Generator().manual_seed(1)
    )
    cos, sin = torch.cat((angles, angles), 1).cos(), angles.sin()
    return cos.float(), torch.cat((-sin, sin), 1).float()


def run(
    backend: Backend, weights: LlamaLayerWeights, x: torch.Tensor, *, fused: bool
) -> tuple[torch.Tensor, KVLayer]:
    layout = make_layout([(1, 1), (13, 13), (6, 6)], 8, 8)
    cos, sin = rotation(layout)
    store = KVLayer.allocate(8, KV_HEADS, 8, DIM, kind="int8")
    y = x.clone()
    if fused:
        backend.llama_layer(y, weights, cos, sin, store, layout)
    else:
        Composed.llama_layer(backend, y, weights, cos, sin, store, layout)
    return y, store


@pytest.mark.parametrize("qwen", [False, True], ids=["llama", "qwen3"])
def test_one_call_has_the_bits_of_the_separate_calls(
    backend: Backend, qwen: bool
) -> None:
    weights = make_weights(backend, qwen=qwen)
    x = torch.randn(20, HIDDEN)
    whole, store = run(backend, weights, x, fused=True)
    parts, other = run(backend, weights, x, fused=False)
    assert torch.equal(whole, parts)
    assert torch.equal(store.k, other.k)
    assert torch.equal(store.v, other.v)


@pytest.mark.parametrize("qwen", [False, True], ids=["llama", "qwen3"])
def test_layer_agrees_with_torch(backend: Backend, qwen: bool) -> None:
    x = torch.randn(20, HIDDEN)
    plain = ReferenceBackend()
    expected, _ = run(plain, make_weights(plain, qwen=qwen), x, fused=True)
    got, _ = run(backend, make_weights(backend, qwen=qwen), x, fused=True)
    # A rounding that falls the other way moves a stored key by one level.
    assert float((got - expected).abs().max()) < 2e-3


def test_a_row_of_the_layer_does_not_see_its_neighbours(backend: Backend) -> None:
    weights = make_weights(backend, qwen=False)
    x = torch.randn(20, HIDDEN)
    before, _ = run(backend, weights, x, fused=True)
    x[0] = float("nan")
    x[14:] *= 50.0
    after, _ = run(backend, weights, x, fused=True)
    assert torch.equal(before[1:14], after[1:14])
    assert bool(after[0].isnan().all())


@pytest.mark.parametrize("n", [1, 7, 16, 77, 576])
def test_small_operations_agree_with_torch(backend: Backend, n: int) -> None:
    torch.manual_seed(2)
    plain = Composed()
    x, weight = torch.randn(5, n) * 9, torch.rand(n)
    assert torch.allclose(
        backend.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5), atol=1e-5
    )
    gate_up = torch.randn(5, 2 * n) * 30
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
    assert torch.allclose(
        backend.silu_multiply(gate_up),
        plain.silu_multiply(gate_up),
        rtol=1e-5,
        atol=1e-6,
    )
    heads = torch.randn(5, 3, 2 * n)
    cos, sin = torch.randn(2, 5, 2 * n)
    ours, theirs = heads.clone(), heads.clone()
    backend.rotate(ours, cos, sin)
    plain.rotate(theirs, cos, sin)
    assert torch.allclose(ours, theirs, atol=1e-5)
