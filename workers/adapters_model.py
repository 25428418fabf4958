"""Adapters of a worker's model: made beside its engine, or why there are none."""

from typing import TYPE_CHECKING

from ..shared.config import WorkerConfig
from .adapters_loader import NoAdapters

if TYPE_CHECKING:
    from .engine.adapters.cache import AdapterCache
    from .engine.model.runner import TransformersRunner
    from .rank_group import RankGroup

_MIB = 1024 * 1024
_TURNED_OFF = "worker.adapters_memory_mb is 0"


def model_adapters(
    runner: "TransformersRunner",
    worker: WorkerConfig,
    group: "RankGroup | None" = None,
) -> "AdapterCache | NoAdapters":
    """Lets a model serve adapters.

    Args:
        runner: The loaded model; changed in place.
        worker: How much memory adapters may take, and their highest rank.
        group: The ranks of a model that is split; None: it is not.
    """
    if not worker.adapters_memory_mb:
        return NoAdapters(_TURNED_OFF)
    from .engine.adapters.serving import serve_adapters

    return serve_adapters(
        runner,
        max_bytes=worker.adapters_memory_mb * _MIB,
        max_rank=worker.max_adapter_rank,
        followers=None if group is None else group.ranks,
    )


def stand_in_adapters(worker: WorkerConfig) -> "AdapterCache | NoAdapters":
    """The same for the echo engine.

    Args:
        worker: As for a model.
    """
    if not worker.adapters_memory_mb:
        return NoAdapters(_TURNED_OFF)
    from .adapters_echo import echo_adapters

    return echo_adapters(worker.adapters_memory_mb * _MIB, worker.max_adapter_rank)
