"""`--profile`: where a worker's profile goes, and an engine that makes one."""

import platform
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from ..shared.errors import ConfigError
from ..shared.process_card import package_version

if TYPE_CHECKING:
    from ..shared.config import ModelConfig, WorkerConfig
    from .engine.detokenizer import DetokenizerSource
    from .engine.engine import Engine
    from .engine.model.runner import TransformersRunner

SUFFIX = ".trace.json"


def profile_file(where: Path) -> Path:
    """Returns the file to write.

    Args:
        where: A file that does not exist, or a directory, in which each start of a
            worker gets a file of its own.

    Raises:
        ConfigError: It is a file already: a profile is never overwritten.
    """
    if where.is_file():
        raise ConfigError(
            "profile", f"{where} is there already; name another file, or a directory"
        )
    if where.is_dir() or not where.suffix:
        return where / f"worker-{secrets.token_hex(4)}{SUFFIX}"
    return where


def profiled_engine(
    where: Path,
    runner: "TransformersRunner",
    model: "ModelConfig",
    worker: "WorkerConfig",
    tokenizer: "DetokenizerSource",
    options: Mapping[str, object],
) -> "Engine":
    """Returns an engine whose steps and kernels are timed into a file.

    Args:
        where: As for `profile_file`.
        runner: The loaded model.
        model: What it is.
        worker: Its limits.
        tokenizer: Of `Engine`, as are the options.
        options: By name.

    Raises:
        ConfigError: The file cannot be written.
    """
    from .engine.profiling.recorder import Recorder
    from .engine.profiling.timed import TimedEngine, TimedRunner, time_kernels

    facts = {
        "version": package_version(),
        "model": model.name,
        "weights": model.weights,
        "kv": model.kv,
        "kernels": runner.target.ops.backend_report()["backend"],
        "device": runner.target.name,
        "threads": worker.threads,
        "host": platform.node(),
    }
    path = profile_file(where)
    try:
        recorder = Recorder(path, facts)
    except OSError as error:
        raise ConfigError("profile", f"{path} cannot be written: {error}") from error
    time_kernels(runner, recorder)
    structlog.get_logger().warning(
        "profiling", path=str(path), note="every eighth step is slower"
    )
    timed: Any = TimedRunner(runner, recorder)  # the runner's own attributes and more
    engine = TimedEngine(timed, tokenizer, **options)  # type: ignore[arg-type]
    engine.time_into(recorder)
    return engine
