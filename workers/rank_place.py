"""Where the ranks of a group may run, asked before any of them is started."""

import os
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog

from ..shared.errors import ConfigError, ModelLoadError
from .rank_order import Backend

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_KEY: Final = "models.tp"


class Place(msgspec.Struct, frozen=True):
    """What all ranks of a group compute on."""

    device: Literal["cpu", "cuda"]
    backend: Backend


def check_degree(path: Path, size: int) -> None:
    """Refuses a number of ranks that a model cannot be split over.

    Args:
        path: Its directory.
        size: Ranks.

    Raises:
        ConfigError: It cannot; the message lists those that work.
        ModelLoadError: Its config.json cannot be read.
    """
    from .engine.model.families import read_config
    from .engine.parallel.shard import check_degree as check

    config = read_config(path)
    try:
        check(config, size)
    except ModelLoadError as error:
        # A setting is wrong, not the model: the same start again would fail again.
        raise ConfigError(_KEY, str(error)) from error


def choose_place(wanted: str, size: int) -> Place:
    """Returns where a group of so many ranks runs.

    Args:
        wanted: `worker.device`.
        size: Ranks; on GPUs each has one of its own.

    Raises:
        ConfigError: There are fewer GPUs than ranks.
    """
    if wanted == "cpu":
        return Place("cpu", "gloo")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 and wanted == "auto":
        reason = f"torch {torch.__version__} sees no CUDA device"
        structlog.get_logger().info(
            "device_chosen", device="cpu", asked=wanted, reason=reason
        )
        return Place("cpu", "gloo")
    if count < size:
        visible = os.environ.get(_VISIBLE)
        seen = f"{count} by {_VISIBLE}={visible}" if visible is not None else str(count)
        raise ConfigError(
            _KEY,
            f"value {size}; each rank needs a CUDA device of its own, and this worker "
            f"sees {seen}; lower tp, give it more (models.devices for `tokenmill up`, "
            f"{_VISIBLE} by hand), or set worker.device = 'cpu'",
        )
    return Place("cuda", "nccl")
