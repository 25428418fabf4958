"""What the options of `tokenmill work` put over the settings, checked as those are."""

import msgspec

from ..shared.config import Config, ModelConfig, WorkerConfig
from ..shared.config_check import check
from ..shared.config_load import LoadedConfig
from ..shared.config_options import COMMAND_LINE, given_settings
from ..shared.errors import ConfigError
from ..shared.keys import MODEL_NAME
from ..shared.model_choice import public_name


def with_worker(loaded: LoadedConfig, **options: object) -> Config:
    """Returns the settings with those of `[worker]` that options have given.

    Args:
        loaded: The settings in force.
        options: Field of `[worker]` -> its value; None leaves what is set.

    Raises:
        ConfigError: A value is none of those that are possible.
    """
    given = given_settings(WorkerConfig, options, "worker")
    worker = msgspec.structs.replace(loaded.config.worker, **given)
    config = msgspec.structs.replace(loaded.config, worker=worker)
    said = {f"worker.{field}": COMMAND_LINE for field in given}
    check(config, {**loaded.origins, **said})
    return config


def chosen_model(
    settings: Config, path: str | None, name: str | None, **options: object
) -> ModelConfig:
    """Returns the model to serve: one of the settings, or one given by options.

    Args:
        settings: In force.
        path: Where it is, or its name in the settings.
        name: Public name.
        options: Field of a model -> its value; None leaves what is set.

    Raises:
        ConfigError: A value is none of those that are possible.
    """
    wanted = name or path or settings.models[0].name
    found = next((one for one in settings.models if one.name == wanted), None)
    base = found or ModelConfig(name=public_name(wanted))
    if not MODEL_NAME.fullmatch(base.name):
        raise ConfigError(
            "models.name",
            f"'{base.name}' cannot be a public name; give one with --name "
            "(letters, digits and . _ / -)",
            COMMAND_LINE,
        )
    changes = given_settings(ModelConfig, options, "models")
    if path is not None and (found is None or name is not None):
        changes["path"] = path
    chosen = msgspec.structs.replace(base, **changes)
    try:
        check(msgspec.structs.replace(settings, models=(chosen,)), {})
    except ConfigError as error:
        # It was one of several, or of none: a place in a list would mislead.
        key = error.key.replace("models[0]", "models", 1)
        given = key.removeprefix("models.") in changes
        raise ConfigError(key, error.problem, COMMAND_LINE if given else None) from None
    return chosen
