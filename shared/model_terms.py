"""Buckets and limits of one model: its own where it has some, else the pool's."""

import msgspec

from .config import Config, LimitsConfig, ModelConfig


def settings_of(config: Config, model: str) -> ModelConfig | None:
    """Returns the settings of a model, or None: a worker may serve one unlisted."""
    return next((one for one in config.models if one.name == model), None)


def buckets_for(config: Config, model: str) -> tuple[int, ...]:
    """Returns the upper bounds of a model's length buckets.

    Args:
        config: Settings in force.
        model: Its public name.
    """
    own = settings_of(config, model)
    return config.pool.buckets if own is None else own.buckets or config.pool.buckets


def limits_for(config: Config, model: str) -> LimitsConfig:
    """Returns what the queue of a model accepts.

    Args:
        config: Settings in force.
        model: Its public name.
    """
    own = settings_of(config, model)
    if own is None:
        return config.limits
    changes = {
        field: value
        for field, value in msgspec.structs.asdict(own.limits).items()
        if value is not None
    }
    return msgspec.structs.replace(config.limits, **changes)
