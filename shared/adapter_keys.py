"""Names in Redis of the adapters of models, built here alone; see `keys.py`."""

from typing import Final

PERMANENT_ADAPTERS: Final = r"tm:(?:adapters|adapters-mark):.+"
"""Pattern of the names that stay for ever: two for each model that has adapters."""


def adapters_key(model: str) -> str:
    """hash, adapter's name -> JSON AdapterCard; `@<name>@<digest>` -> that of one which
    was replaced or removed and may still be in use; permanent, one a model.
    """
    return f"tm:adapters:{model}"


def mark_key(model: str) -> str:
    """string, `<epoch>:<number>`: the number rises with each change of the hash above,
    the epoch is another one where Redis has lost it; permanent, one a model.
    """
    return f"tm:adapters-mark:{model}"


def check_key(check_id: str) -> str:
    """string, JSON AdapterCheck: what a worker is asked to look at; expires."""
    return f"tm:adapter-check:{check_id}"


def verdict_key(check_id: str) -> str:
    """string, JSON AdapterVerdict: what it found; expires."""
    return f"tm:adapter-verdict:{check_id}"
