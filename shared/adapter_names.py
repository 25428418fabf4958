"""How an adapter is named beside its model: `<model>:<adapter>`."""

import re
from typing import Final

ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
"""No colon, slash or @: names stand behind a model's, and before a digest."""
MOST_FULL_NAME: Final = 96 + 1 + 64
"""Characters of a model's name with an adapter's."""


def full_name(model: str, adapter: str | None) -> str:
    """Returns the name of a model with an adapter; the model's own without one."""
    return model if adapter is None else f"{model}:{adapter}"


def split_name(name: str) -> tuple[str, str | None]:
    """Returns model and adapter of `<model>:<adapter>`; None without a colon."""
    model, colon, adapter = name.partition(":")
    return model, adapter if colon else None
