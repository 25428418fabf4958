"""Random paged batches for the kernel tests, on the device under test."""

import os
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from tokenmill.workers.engine.batch import SequenceSlice, StepBatch
from tokenmill.workers.engine.kernels import reference
from tokenmill.workers.engine.kernels.layout import KVKind, KVLayer, StepLayout
from tokenmill.workers.engine.kernels.triton.attention import Tiling, paged_attention
from tokenmill.workers.engine.kernels.triton.layout import store_to_device, to_device

DEVICE = os.environ.get("TOKENMILL_TEST_DEVICE", "cpu")
SMALL = Tiling(rows=16, keys=16, split=32)
"""Tiles so small that short contexts have several splits."""

Lengths = list[tuple[int, int]]
"""Per sequence: tokens in this step, and tokens stored after it."""


@dataclass
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    kind: KVKind


@dataclass
class Paged:
    """A store filled by the reference, and what it holds, sequence by sequence."""

    shape: Shape
    layer: KVLayer
    tables: list[tuple[int, ...]]
    queries: list[torch.Tensor]
    """Per sequence float32 [context, heads, dim]: the query of every position."""

    def layout(self, which: list[int], lengths: Lengths) -> StepLayout:
        """The layout of a step over some of the sequences."""
        slices, positions, start = [], [], 0
        for index, (count, context) in zip(which, lengths, strict=True):
            slices.append(SequenceSlice(start, count, context, self.tables[index]))
            positions.append(np.arange(context - count, context))
            start += count
        batch = StepBatch(
            np.zeros(start, np.int64),
            np.concatenate(positions),
            tuple(slices),
            np.arange(start),
        )
        return StepLayout.from_batch(batch, self.shape.block_size)

    def query(self, which: list[int], lengths: Lengths) -> torch.Tensor:
        """The packed queries of that step."""
        pieces = [
            self.queries[index][context - count : context]
            for index, (count, context) in zip(which, lengths, strict=True)
        ]
        return torch.cat(pieces)


def fill(shape: Shape, contexts: list[int], seed: int) -> Paged:
    """Stores random keys and values of some sequences in shuffled blocks."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // shape.block_size) for context in contexts]
    total = sum(counts) + 3
    free = torch.randperm(total, generator=generator).tolist()
    layer = KVLayer.allocate(
        total, shape.kv_heads, shape.block_size, shape.dim, kind=shape.kind
    )
    paged = Paged(shape, layer, [], [])
    for context, count in zip(contexts, counts, strict=True):
        paged.tables.append(tuple(free[:count]))
        free = free[count:]
        paged.queries.append(
            torch.randn(context, shape.heads, shape.dim, generator=generator)
        )
        layout = paged.layout([len(paged.tables) - 1], [(context, context)])
        k, v = (
            torch.randn(context, shape.kv_heads, shape.dim, generator=generator)
            for _ in range(2)
        )
        reference.kv_write(k, v, layer, layout)
    return paged


def on_device(layer: KVLayer) -> KVLayer:
    """The store where the kernels run."""
    return store_to_device(layer, DEVICE)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Head counts and sizes, powers of two and others."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Shape(
        heads=kv_heads * draw(st.sampled_from([1, 3, 4])),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 20, 64, 80, 96, 128])),
        block_size=draw(st.sampled_from([4, 8, 12])),
        kind=draw(st.sampled_from(["int8", "int4", "float32"])),
    )


@st.composite
def steps(draw: st.DrawFn) -> Lengths:
    """Decodes, first chunks and later chunks, mixed."""
    lengths = []
    for _ in range(draw(st.integers(1, 3))):
        context = draw(st.integers(1, 70))
        count = draw(st.one_of(st.just(1), st.integers(1, min(context, 24))))
        lengths.append((count, context))
    return lengths


def attend(q, layer, layout, *, tiling=SMALL, **options):
    """Runs the kernels on the device under test; everything else is on the CPU."""
    alibi = options.pop("alibi", None)
    out = paged_attention(
        q.to(DEVICE),
        on_device(layer),
        to_device(layout, DEVICE),
        scale=options.pop("scale", q.shape[-1] ** -0.5),
        alibi=None if alibi is None else alibi.to(DEVICE),
        tiling=tiling,
        **options,
    )
    return out.cpu()
