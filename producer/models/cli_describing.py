"""From the options of `tokenmill models add` to what a version's workers load."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ...shared.errors import ConfigError
from ...shared.typed import shown

if TYPE_CHECKING:
    from ...shared.config_model import ModelConfig

_MOST_DIGITS: Final = 4


def as_workers_find_it(path: str) -> str:
    """Returns a path that does not hang on the directory we are in."""
    local = Path(path).expanduser()
    return str(local.resolve()) if local.exists() else path


def read_devices(given: Sequence[str]) -> list[int]:
    """Reads the numbers of CUDA devices.

    Raises:
        ConfigError: One is no number.
    """
    for one in given:
        if not (one.isascii() and one.isdigit() and len(one) <= _MOST_DIGITS):
            raise ConfigError(
                "devices",
                f"value {shown(one)}; expected the number of a CUDA device as "
                "nvidia-smi counts them, as --device 0, and one --device for each; "
                "none takes what is there",
                "command line",
            )
    return [int(one) for one in given]


def config_of(
    model: str, version: str, options: "Mapping[str, object]"
) -> "ModelConfig":
    """Returns a version's model as options describe it.

    Args:
        model: Public name.
        version: Its name.
        options: Field -> value; None leaves the default.

    Raises:
        ConfigError: A value is none of those that are possible.
    """
    from ...shared.config_model import ModelConfig
    from ...shared.config_options import given_settings

    given = given_settings(ModelConfig, options)
    return msgspec.convert({"name": model, "version": version, **given}, ModelConfig)
