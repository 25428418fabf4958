"""A worker's part of its host: processor cores, or threads where it has none."""

import os
from collections.abc import Mapping

import msgspec
import structlog

from ..shared.config import ModelConfig, WorkerConfig
from ..shared.pool.placement import CORES, available_cores


def bind_cores(environ: Mapping[str, str] | None = None) -> bool:
    """Binds this process, and all that it starts, to the cores that are its share.

    Call it before native code starts threads, which inherit it.

    Args:
        environ: This process's; None is the real one.

    Returns:
        Whether it has cores of its own.
    """
    told = (os.environ if environ is None else environ).get(CORES)
    if not told or not hasattr(os, "sched_setaffinity"):
        return False
    cores = {int(core) for core in told.split(",")}
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        # The host has taken cores away since: then a share of the threads remains.
        structlog.get_logger().warning(
            "cores_not_bound", cores=sorted(cores), error=str(error)
        )
        return False
    return True


def within_share(
    worker: WorkerConfig, model: ModelConfig, environ: Mapping[str, str] | None = None
) -> WorkerConfig:
    """Returns the settings with compute threads for the model's share of the host.

    Args:
        worker: As read; a number of threads that it names stands.
        model: Its `share`, for each of its `tp` processes.
        environ: This process's; None is the real one.
    """
    if model.share is None or model.devices or bind_cores(environ):
        return worker
    if worker.threads is not None:
        return worker
    cores = len(available_cores()) or os.cpu_count() or 1
    threads = max(model.tp, round(cores * model.share * model.tp))
    return msgspec.structs.replace(worker, threads=threads)
