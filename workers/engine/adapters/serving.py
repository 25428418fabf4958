"""Lets a loaded model serve adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ....shared.errors import EngineError
from ..parallel.adapters import FollowerAdapters, GroupLoader
from .applying import StepAdapters
from .cache import AdapterCache
from .config import MAX_RANK
from .sites import AdaptedModel, adapted_model
from .source import AdapterLoader, LoadedAdapter
from .weights import read_adapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..model.runner import TransformersRunner
    from ..parallel.adapter_orders import Followers, LoadAnswer


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
        weights = read_adapter(
            path,
            self._model.linears,
            max_rank=self._max_rank,
            cuts=self._model.cuts,
        )
        deltas = self._model.prepare(weights.pairs, path)
        size = sum(delta.nbytes for delta in deltas.values())
        return LoadedAdapter(weights.facts, deltas, size)


def serve_adapters(
    runner: TransformersRunner,
    *,
    max_bytes: int,
    max_rank: int | None = MAX_RANK,
    followers: Followers | None = None,
) -> AdapterCache:
    """Lets a runner's steps have adapters; give the cache to the engine, too.

    Args:
        runner: A loaded model, or what leads the ranks of one; changed in place.
        max_bytes: Memory that all adapters together may take, on each rank.
        max_rank: Largest rank of an adapter; None: any.
        followers: The other ranks, each of which has called `follow_adapters`; None:
            there are none.

    Returns:
        Where adapters are loaded to, and where engine and runner find them.

    Raises:
        EngineError: The model is split, and no other ranks are given.
    """
    checkpoint, state = runner.base
    model = adapted_model(checkpoint, state)
    loader: AdapterLoader = ModelAdapters(model, max_rank)
    if followers is not None:
        loader = GroupLoader(loader, followers)
    elif checkpoint.options.shard is not None:
        raise EngineError("adapters of a split model have to reach its other ranks")
    cache = AdapterCache(loader, max_bytes)
    runner.adapters = StepAdapters(model, cache)
    return cache


def follow_adapters(
    runner: TransformersRunner,
    answer: Callable[[LoadAnswer], None],
    *,
    max_rank: int | None = MAX_RANK,
) -> FollowerAdapters:
    """Lets the steps of a rank that follows have adapters.

    Args:
        runner: The rank's part of a model; changed in place.
        answer: Takes to rank 0 how its loads went, from any thread.
        max_rank: Largest rank of an adapter; None: any.

    Returns:
        What hears the orders of rank 0.
    """
    model = adapted_model(*runner.base)
    adapters = FollowerAdapters(ModelAdapters(model, max_rank), answer)
    runner.adapters = StepAdapters(model, adapters)
    return adapters
