"""Which settings a worker of a named version serves with."""

import msgspec

from ..shared.config_model import ModelConfig
from ..shared.errors import ConfigError
from ..shared.redis import connect, translate
from ..shared.version_life import VersionLife


async def model_of_version(
    url: str, settings_model: ModelConfig, version: str, *, given: bool
) -> ModelConfig:
    """Returns what a worker of a version is to load.

    Args:
        url: Redis of the pool.
        settings_model: What settings and options say of the model.
        version: Whose worker it is.
        given: Whether the options name a path: then a version nobody added will do.

    Raises:
        UnknownVersion: Neither settings nor pool know it.
        ConfigError: The options name another path than the pool has recorded.
    """
    if settings_model.version == version and not given:
        return settings_model
    chosen = msgspec.structs.replace(settings_model, version=version)
    client = connect(url)
    try:
        life = VersionLife(client, chosen.name, 1)
        with translate():
            specs = await life.versions.specs()
        if version not in specs and given:
            return chosen
        spec = life.known(version, specs)
    finally:
        await client.aclose()
    if given and spec.model.path != chosen.path:
        raise ConfigError(
            "model",
            f"version {version} of {chosen.name} is recorded with "
            f"'{spec.model.path}'; leave --model away, or choose another version",
            "command line",
        )
    return spec.model
