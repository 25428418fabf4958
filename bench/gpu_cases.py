"""Random stores and steps for the GPU's checks and times."""

import torch

from tokenmill.workers.engine.kernels.layout import KVKind, KVLayer, StepLayout

BLOCK_SIZE = 8


def step(sequences: int, context: int, query: int, *, seed: int = 0) -> StepLayout:
    """A step of equal sequences whose blocks are scattered over the pool.

    Args:
        sequences: How many.
        context: Tokens of each, this step's included.
        query: Tokens of each in this step.
        seed: Of the order of blocks.
    """
    blocks = -(-context // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sequences * blocks, generator=generator)
    table = order.to(torch.int32).view(sequences, -1)
    positions = torch.arange(context - query, context)
    slots = table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE
    return StepLayout(
        (slots + positions % BLOCK_SIZE).reshape(-1),
        torch.arange(0, (sequences + 1) * query, query, dtype=torch.int32),
        torch.full((sequences,), context, dtype=torch.int32),
        table,
        positions.repeat(sequences),
    )


def store(layout: StepLayout, kv_heads: int, head_dim: int, kind: KVKind) -> KVLayer:
    """A store on the host with room for a step's blocks."""
    blocks = layout.block_table.numel()
    return KVLayer.allocate(blocks, kv_heads, BLOCK_SIZE, head_dim, kind=kind)


def vectors(
    tokens: int, heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Random queries, keys or values [tokens, heads, head_dim]."""
    return torch.randn(tokens, heads, head_dim, device=device, dtype=dtype)


def stored_bytes(layer: KVLayer, tokens: int) -> int:
    """Bytes that hold the keys and values of that many tokens."""
    slots = layer.k.shape[0] * layer.k.shape[2]
    tensors = [layer.k, layer.v, layer.k_scale, layer.v_scale]
    return sum(t.nbytes for t in tensors if t is not None) * tokens // slots
