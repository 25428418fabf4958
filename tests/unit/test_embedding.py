"""The embedding beside quantized layers: half the bytes, the same rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tokenmill.workers.engine.model.embedding import HalfEmbedding, halve_embedding


class Model(nn.Module):
    """As much of a transformers model as is looked at."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, embedding: nn.Module) -> None:
        self.embedding = embedding


class Scaled(nn.Embedding):
    """An embedding that does more than look rows up."""


def test_rows_come_back_as_float32_within_half_a_unit_of_float16() -> None:
    model = Model(nn.Embedding(50, 16))
    ids = torch.tensor([3, 3, 49])
    exact = model.embedding(ids)
    halve_embedding(model)
    rows = model.embedding(ids)
    assert isinstance(model.embedding, HalfEmbedding)
    assert model.embedding.weight.nbytes == 2 * 50 * 16
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, exact, rtol=2**-11, atol=2**-25)


@pytest.mark.parametrize(
    "embedding",
    [Scaled(4, 2), nn.Embedding(4, 2, dtype=torch.bfloat16)],
    ids=["does more", "is small already"],
)
def test_others_are_left_alone(embedding: nn.Module) -> None:
    model = Model(embedding)
    halve_embedding(model)
    assert model.embedding is embedding


@pytest.mark.parametrize("value", [1e5, float("nan"), float("inf")])
def test_values_that_float16_cannot_hold_keep_float32(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    logger = SimpleNamespace(warning=lambda event, **_: told.append(event))
    monkeypatch.setattr("tokenmill.workers.engine.model.embedding.log", logger)
    embedding = nn.Embedding(4, 2)
    with torch.no_grad():
        embedding.weight[1, 1] = value
    model = Model(embedding)
    halve_embedding(model)
    assert model.embedding is embedding
    assert told == ["embedding_stays_float32"]
