"""The input embedding of a model with quantized layers, kept in half precision.

A float32 embedding would outweigh what quantizing saves in a small model: for
SmolLM2-135M it takes as much memory as all INT8 layers together. Rounding it to 16 bits
changes an entry by 2^-11 of its size at most, far less than INT8 does to the layers.
"""

from typing import Final

import structlog
import torch
from torch import nn

log = structlog.get_logger("tokenmill.model")

LARGEST: Final = float(torch.finfo(torch.float16).max)


class HalfEmbedding(nn.Module):
    """Looks rows up in float16 and returns them in the type of activations.

    Args:
        weight: [vocabulary, hidden], any float type.
        dtype: Of what is returned.
    """

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().to(torch.float16))
        self._dtype = dtype

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns [..., hidden] for int64 token ids [...]."""
        return nn.functional.embedding(token_ids, self.weight).to(self._dtype)


def halve_embedding(model: nn.Module) -> None:
    """Swaps a float32 input embedding for one of half the size.

    Left alone: one that does more than look rows up, one already in 16 bits, and one
    with values beyond float16's range (logged).

    Args:
        model: A transformers model with its weights; changed in place.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if type(embedding) is not nn.Embedding or embedding.weight.dtype != torch.float32:
        return
    largest = float(embedding.weight.detach().abs().max())
    if not largest <= LARGEST:
        log.warning("embedding_stays_float32", largest=largest, limit=LARGEST)
        return
    model.set_input_embeddings(  # type: ignore[operator]
        HalfEmbedding(embedding.weight, embedding.weight.dtype)
    )
