"""From settings to a runner: of the whole model, or of this rank's shard of it."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..shared.config import LogConfig, ModelConfig, WorkerConfig

if TYPE_CHECKING:
    from .engine.detokenizer import TokenTable
    from .engine.model.runner import TransformersRunner
    from .engine.parallel.communicator import Communicator
    from .rank_group import RankGroup

Progress = Callable[[str, float], None]


def load_model_runner(
    path: Path,
    model: ModelConfig,
    worker: WorkerConfig,
    progress: Progress | None = None,
    communicator: "Communicator | None" = None,
) -> "TransformersRunner":
    """Loads a model by its settings.

    Args:
        path: Its directory.
        model: Precision.
        worker: Limits.
        progress: Called with a stage and its fraction done.
        communicator: Of a rank, which loads its shard alone; None: the whole model.

    Raises:
        ModelLoadError: It cannot be read or held in memory.
    """
    from .engine.model.budget import ADAPTERS_IN_MARGIN_MB, bound_memory
    from .engine.model.gpu.graph_start import GraphOptions
    from .engine.model.load import load_runner

    bound_memory(model.share)
    return load_runner(
        path,
        weights=model.weights,
        kv=model.kv,
        block_size=worker.block_size,
        num_blocks=worker.num_blocks,
        kv_memory_mb=worker.kv_memory_mb,
        apart_mb=max(0, worker.adapters_memory_mb - ADAPTERS_IN_MARGIN_MB),
        max_context=worker.max_context,
        threads=worker.threads,
        device=worker.device,
        outlier_threshold=model.outlier_threshold,
        offload_layers=worker.offload_layers,
        graphs=GraphOptions(
            max_running=worker.max_running,
            step_tokens=worker.max_running + worker.prefill_chunk,
            enabled=worker.cuda_graphs,
        ),
        progress=progress,
        communicator=communicator,
    )


@contextmanager
def other_ranks(
    path: Path,
    model: ModelConfig,
    worker: WorkerConfig,
    progress: Progress | None,
    log: LogConfig | None,
) -> "Iterator[RankGroup | None]":
    """The other ranks of a model that is to be split: they start and load beside what
    the block does, and end if it raises. None where there are none.

    Args:
        path: The model's directory.
        model: Its settings.
        worker: Limits of the whole worker.
        progress: Told how far the slowest rank is.
        log: How they log.

    Raises:
        ConfigError: The model does not split so, or there are too few devices.
    """
    if model.tp == 1:
        yield None
        return
    from .rank_group import RankGroup

    group = RankGroup.start(path, model, worker, progress, log)
    try:
        yield group
    except BaseException:
        group.close()
        raise


def load_beside(
    table: "Future[TokenTable]",
    group: "RankGroup | None",
    path: Path,
    model: ModelConfig,
    worker: WorkerConfig,
    progress: Progress | None,
) -> "TransformersRunner":
    """Loads the weights while the tokenizer is parsed; a bad one ends the load.

    Args:
        table: The tokenizer, on its way.
        group: The other ranks, which the runner then leads; None: there are none.
        path: The model's directory.
        model: Precision.
        worker: Limits.
        progress: Told of the load where this process is all of it.

    Raises:
        ModelLoadError: It cannot be read or held in memory, or a rank is lost.
    """
    if group is None:
        return load_model_runner(path, model, worker, _unless_failed(table, progress))

    def load_shard(
        own: WorkerConfig, common: Progress | None, communicator: "Communicator"
    ) -> "TransformersRunner":
        watched = _unless_failed(table, common)
        return load_model_runner(path, model, own, watched, communicator)

    # What leads a group has all that the runner of rank 0 has.
    return cast("TransformersRunner", group.load(load_shard))


def _unless_failed(table: "Future[TokenTable]", progress: Progress | None) -> Progress:
    """Returns a progress that ends the load of weights when the tokenizer is bad."""

    def report(stage: str, fraction: float) -> None:
        if table.done():
            table.result()
        if progress is not None:
            progress(stage, fraction)

    return report
