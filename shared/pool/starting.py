"""From the command line of `tokenmill up` to a running pool."""

import asyncio
import os
from pathlib import Path

import msgspec

from ..config import Config
from ..config_check import check
from ..config_load import LoadedConfig, load_config
from ..config_options import COMMAND_LINE
from ..logging import configure
from ..model_choice import model_named
from .plan import PoolOptions
from .up import Pool


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the command line puts over those of the file."""

    url: str | None = None
    """Redis to use."""
    state_dir: Path | None = None
    workers: int | None = None
    """Of each model."""
    models: tuple[str, ...] = ()
    """The only ones to serve."""


def start(options: PoolOptions, overrides: Overrides, ready_file: Path | None) -> int:
    """Runs a pool until it is told to stop or cannot go on.

    Args:
        options: Which processes it has.
        overrides: What was given on the command line.
        ready_file: Written when the pool is ready.

    Returns:
        The exit code, see `Pool.run`.

    Raises:
        ConfigError: A setting cannot be used.
    """
    settings = overridden(load_config(options.config_path), overrides)
    configure(settings.log, "up")
    url = overrides.url or os.environ.get("TOKENMILL_URL") or settings.redis.url
    return asyncio.run(Pool(options, settings, url, ready_file).run())


def overridden(loaded: LoadedConfig, overrides: Overrides) -> Config:
    """Returns the settings with what the command line says put over them.

    Raises:
        ConfigError: Together they make no sense.
    """
    config, origins = loaded.config, dict(loaded.origins)
    if overrides.state_dir is not None:
        origins["pool.state_dir"] = COMMAND_LINE
        pool = msgspec.structs.replace(config.pool, state_dir=str(overrides.state_dir))
        config = msgspec.structs.replace(config, pool=pool)
    models = config.models
    if overrides.models:
        # Their places are others now, and nobody has asked where each value came from.
        origins = {k: one for k, one in origins.items() if not k.startswith("models[")}
        known = {model.name: model for model in models}
        models = tuple(
            known.get(name) or model_named(name) for name in overrides.models
        )
    if overrides.workers is not None:
        models = tuple(
            msgspec.structs.replace(model, replicas=overrides.workers)
            for model in models
        )
        for index in range(len(models)):
            origins[f"models[{index}].replicas"] = COMMAND_LINE
    config = msgspec.structs.replace(config, models=models)
    check(config, origins)
    return config
