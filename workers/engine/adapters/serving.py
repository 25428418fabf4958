"""Lets a loaded model serve adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ....shared.errors import ModelLoadError
from .applying import StepAdapters
from .cache import AdapterCache
from .config import MAX_RANK
from .sites import AdaptedModel, adapted_model
from .source import LoadedAdapter
from .weights import read_adapter

if TYPE_CHECKING:
    from ..model.runner import TransformersRunner


class ModelAdapters:
    """Reads adapters for one loaded model.

    Args:
        model: The loaded model.
        max_rank: Largest rank allowed; None: any.
    """

    def __init__(self, model: AdaptedModel, max_rank: int | None = MAX_RANK) -> None:
        self._model = model
        self._max_rank = max_rank

    def load(self, path: Path) -> LoadedAdapter:
        """Reads, checks and prepares an adapter.

        Args:
            path: The adapter's directory.

        Raises:
            ModelLoadError: It cannot be served; the message says why.
        """
        weights = read_adapter(path, self._model.linears, max_rank=self._max_rank)
        deltas = self._model.prepare(weights.pairs, path)
        size = sum(delta.nbytes for delta in deltas.values())
        return LoadedAdapter(weights.facts, deltas, size)


def serve_adapters(
    runner: TransformersRunner, *, max_bytes: int, max_rank: int | None = MAX_RANK
) -> AdapterCache:
    """Lets a runner's steps have adapters; give the cache to the engine, too.

    Args:
        runner: A loaded model; changed in place.
        max_bytes: Memory that all adapters together may take.
        max_rank: Largest rank of an adapter; None: any.

    Returns:
        Where adapters are loaded to, and where engine and runner find them.

    Raises:
        ModelLoadError: This model is spread over several ranks.
    """
    checkpoint, state = runner.base
    if checkpoint.wish.shard is not None:
        raise ModelLoadError(
            "adapters are not served with tensor parallelism: a rank has part of each "
            "layer; use tp = 1, or merge the adapter (tokenmill lora merge)"
        )
    model = adapted_model(checkpoint, state)
    cache = AdapterCache(ModelAdapters(model, max_rank), max_bytes)
    runner.adapters = StepAdapters(model, cache)
    return cache
