"""Random stores, layouts and variants of attention, for every compiled backend."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import COMPILED, KINDS, backend_named, make_layout, tables_of

from tokenmill.workers.engine.kernels import reference
from tokenmill.workers.engine.kernels.backends import Backend
from tokenmill.workers.engine.kernels.layout import KVKind, KVLayer, StepLayout

RUNS = settings(max_examples=30, deadline=None)
DIMS = (4, 16, 20, 64, 72, 80, 96)


@dataclass
class Case:
    """Sequences with everything stored, and how to attend over them."""

    totals: list[int]
    kv_heads: int
    group: int
    dim: int
    block_size: int
    kind: KVKind
    window: int | None
    softcap: float | None
    with_alibi: bool
    seed: int

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        blocks = sum(-(-total // self.block_size) for total in self.totals) + 3
        self.whole = make_layout(
            [(total, total) for total in self.totals],
            self.block_size,
            blocks,
            seed=self.seed,
        )
        self.layer = KVLayer.allocate(
            blocks, self.kv_heads, self.block_size, self.dim, kind=self.kind
        )
        tokens = len(self.whole.positions)
        self.k, self.v = torch.randn(2, tokens, self.kv_heads, self.dim)
        self.q = torch.randn(tokens, self.kv_heads * self.group, self.dim)
        slopes = torch.linspace(0.01, 0.3, self.q.shape[1])[:, None]
        self.alibi = (
            slopes * torch.arange(max(self.totals)) if self.with_alibi else None
        )

    def attend(
        self, backend: Backend, q: torch.Tensor, layout: StepLayout
    ) -> torch.Tensor:
        return backend.paged_attention(
            q,
            self.layer,
            layout,
            scale=self.dim**-0.5,
            window=self.window,
            alibi=self.alibi,
            softcap=self.softcap,
        )

    def piece(
        self, parts: list[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, StepLayout]:
        """Packs queries first..end of some sequences: (sequence, first, end) each."""
        tables = tables_of(self.whole)
        starts = self.whole.query_start.tolist()
        layout = make_layout(
            [(end - first, end) for _, first, end in parts],
            self.block_size,
            len(self.layer.k),
            tables=[tables[s][: -(-end // self.block_size)] for s, _, end in parts],
        )
        rows = [self.q[starts[s] + first : starts[s] + end] for s, first, end in parts]
        return torch.cat(rows), layout


def cases(block_sizes: tuple[int, ...] = (1, 3, 8, 16)) -> st.SearchStrategy[Case]:
    """Draws cases; lengths sit at the edges of blocks and tiles as often as not."""
    edges = st.sampled_from([1, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65])
    return st.builds(
        Case,
        totals=st.lists(edges | st.integers(1, 110), min_size=1, max_size=5),
        kv_heads=st.integers(1, 3),
        group=st.sampled_from([1, 2, 3, 4, 5, 8]),
        dim=st.sampled_from(DIMS),
        block_size=st.sampled_from(block_sizes),
        kind=st.sampled_from(KINDS),
        window=st.none() | st.integers(1, 70),
        softcap=st.none() | st.floats(0.5, 30.0),
        with_alibi=st.booleans(),
        seed=st.integers(0, 2**31),
    )


@pytest.mark.parametrize("name", COMPILED)
def test_writes_have_the_bits_and_attention_agrees(name: str) -> None:
    with backend_named(name) as backend:

        @RUNS
        @given(cases())
        def check(case: Case) -> None:
            backend.kv_write(case.k, case.v, case.layer, case.whole)
            expected_layer = KVLayer.allocate(
                len(case.layer.k),
                case.kv_heads,
                case.block_size,
                case.dim,
                kind=case.kind,
            )
            reference.kv_write(case.k, case.v, expected_layer, case.whole)
            assert torch.equal(case.layer.k, expected_layer.k)
            assert torch.equal(case.layer.v, expected_layer.v)
            if expected_layer.k_scale is not None:
                assert case.layer.k_scale is not None
                assert torch.equal(case.layer.k_scale, expected_layer.k_scale)
            got = case.attend(backend, case.q, case.whole)
            expected = reference.paged_attention(
                case.q,
                case.layer,
                case.whole,
                scale=case.dim**-0.5,
                window=case.window,
                alibi=case.alibi,
                softcap=case.softcap,
            )
            assert float((got - expected).abs().max()) < 1e-5

        check()


@pytest.mark.parametrize("name", COMPILED)
def test_a_query_has_the_same_bits_in_any_step(name: str) -> None:
    with backend_named(name) as backend:

        @RUNS
        @given(cases(), st.data())
        def check(case: Case, data: st.DataObject) -> None:
            reference.kv_write(case.k, case.v, case.layer, case.whole)
            together = case.attend(backend, case.q, case.whole)
            starts = case.whole.query_start.tolist()
            parts = []
            for s, total in enumerate(case.totals):
                first = data.draw(st.integers(0, total - 1), label="first")
                parts.append((s, first, data.draw(st.integers(first + 1, total))))
            parts = data.draw(st.permutations(parts))[: data.draw(st.integers(1, 5))]
            got = case.attend(backend, *case.piece(parts))
            expected = torch.cat(
                [together[starts[s] + a : starts[s] + b] for s, a, b in parts]
            )
            assert torch.equal(got, expected)

        check()


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 700])
def test_long_contexts_are_shared_out_without_a_trace(
    name: str, kind: KVKind, window: int | None
) -> None:
    """Alone, a long context is cut into segments; in company it is not."""
    totals = [1100, 512, 513, 1024]
    case = Case(totals, 1, 3, 64, 8, kind, window, None, with_alibi=False, seed=5)
    reference.kv_write(case.k, case.v, case.layer, case.whole)
    alone = [(s, total - 1, total) for s, total in enumerate(totals)]
    with backend_named(name) as backend:
        backend.set_num_threads(2)
        apart = [case.attend(backend, *case.piece([part])) for part in alone]
        many = alone * 3
        among = case.attend(backend, *case.piece(many))
        chunk = case.attend(backend, *case.piece([(0, 1050, 1100)]))
        backend.set_num_threads(1)
        single = case.attend(backend, *case.piece(alone[:1]))
    assert torch.equal(torch.cat(apart), among[: len(totals)])
    assert torch.equal(apart[0], single)
    assert torch.equal(apart[0][0], chunk[-1])
    q, layout = case.piece(alone)
    expected = reference.paged_attention(
        q, case.layer, layout, scale=64**-0.5, window=window
    )
    assert float((torch.cat(apart) - expected).abs().max()) < 1e-5
