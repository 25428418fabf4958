"""Names in Redis of the adapters of models, built here alone; see `keys.py`."""

from typing import Final

PERMANENT_ADAPTERS: Final = r"tm:adapters:.+"
"""Pattern of the names that stay for ever: one for each model that has adapters."""


def adapters_key(model: str) -> str:
    """hash, adapter's name -> JSON AdapterCard; `@<name>@<digest>` -> that of one which
    was replaced or removed and may still be in use; permanent, one a model.
    """
    return f"tm:adapters:{model}"


def check_key(check_id: str) -> str:
    """string, JSON AdapterCheck: what a worker is asked to look at; expires."""
    return f"tm:adapter-check:{check_id}"


def verdict_key(check_id: str) -> str:
    """string, JSON AdapterVerdict: what it found; expires."""
    return f"tm:adapter-verdict:{check_id}"
