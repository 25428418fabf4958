"""Settings that are given as options of a command."""

from collections.abc import Mapping
from typing import Any, Final, get_type_hints

import msgspec

from .config_load import convert_setting

COMMAND_LINE: Final = "command line"
"""Where such a value comes from, for errors."""


def given_settings(
    kind: type[msgspec.Struct], options: Mapping[str, object], section: str = ""
) -> dict[str, Any]:
    """Returns the options that were given, each of the type of its setting.

    Args:
        kind: What the settings are fields of.
        options: Field -> value; None: not given.
        section: Its name in the settings file, for errors.

    Raises:
        ConfigError: A value is none of those that are possible.
    """
    kinds = get_type_hints(kind)
    start = f"{section}." if section else ""
    return {
        field: convert_setting(
            f"{start}{field}", value, kinds[field], COMMAND_LINE, from_text=False
        )
        for field, value in options.items()
        if value is not None
    }
