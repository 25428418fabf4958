"""Backends and paged layouts for the kernel tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tokenmill.workers.engine.kernels import reference
from tokenmill.workers.engine.kernels.backends import Backend, ReferenceBackend
from tokenmill.workers.engine.kernels.layout import KVKind, KVLayer, StepLayout

COMPILED = ("cpp", "cpp-baseline", "numba")
"""Every implementation that is held against the reference."""


@contextmanager
def backend_named(name: str) -> Iterator[Backend]:
    """Opens a backend, skipping the test where this host cannot have it."""
    if name == "reference":
        yield ReferenceBackend()
        return
    if name == "numba":
        from tokenmill.workers.engine.kernels.cpu.numba_backend import NumbaBackend

        yield NumbaBackend()
        return
    try:
        from tokenmill.workers.engine.kernels.cpu.cpp_backend import CppBackend

        backend = CppBackend()
    except ImportError as error:
        pytest.skip(str(error))
    best = backend.name.partition("/")[2]
    backend.set_num_threads(2)
    if name == "cpp-baseline" and not (backend.use("baseline") or backend.use("neon")):
        pytest.skip("no second instruction set in this build")
    try:
        yield backend
    finally:
        assert backend.use(best)


def make_layout(
    sequences: list[tuple[int, int]],
    block_size: int,
    num_blocks: int,
    *,
    seed: int = 0,
    tables: list[list[int]] | None = None,
) -> StepLayout:
    """Lays out sequences in shuffled blocks.

    Args:
        sequences: (query length, context length) each.
        block_size: Tokens per block.
        num_blocks: Blocks in the pool.
        seed: Of the shuffle.
        tables: Block tables to use instead of drawing them.
    """
    if tables is None:
        shuffled = torch.randperm(
            num_blocks, generator=torch.Generator().manual_seed(seed)
        ).tolist()
        tables = []
        for _, context in sequences:
            count = -(-context // block_size)
            tables.append(shuffled[:count])
            shuffled = shuffled[count:]
    table = torch.zeros((len(tables), max(map(len, tables))), dtype=torch.int32)
    slots, positions, starts = [], [], [0]
    for row, ((length, context), blocks) in enumerate(
        zip(sequences, tables, strict=True)
    ):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        starts.append(starts[-1] + length)
        for position in range(context - length, context):
            positions.append(position)
            block = blocks[position // block_size]
            slots.append(block * block_size + position % block_size)
    return StepLayout(
        torch.tensor(slots, dtype=torch.int64),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([context for _, context in sequences], dtype=torch.int32),
        table,
        torch.tensor(positions, dtype=torch.int64),
    )


def tables_of(layout: StepLayout) -> list[list[int]]:
    """Returns the layout's block tables, padding included."""
    return [list(map(int, row)) for row in layout.block_table.tolist()]


KINDS: tuple[KVKind, ...] = ("int8", "int4", "float32")
"""Every way of storing K and V."""


def filled_layer(
    kv_heads: int,
    dim: int,
    block_size: int,
    num_blocks: int,
    *,
    kind: KVKind,
    seed: int,
) -> KVLayer:
    """Returns a store full of random tokens, as other sequences would leave it."""
    layer = KVLayer.allocate(num_blocks, kv_heads, block_size, dim, kind=kind)
    generator = torch.Generator().manual_seed(seed)
    slots = torch.arange(num_blocks * block_size)
    whole = StepLayout(slots, slots[:0].int(), slots[:0].int(), slots[:0].int(), slots)
    k, v = torch.randn(2, len(slots), kv_heads, dim, generator=generator)
    reference.kv_write(k, v, layer, whole)
    return layer
