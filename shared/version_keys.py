"""Names in Redis of a model's versions; all of them but one are permanent."""

from typing import Final

VERSIONED: Final = "tm:versioned"
"""set, models that have a hash of versions; permanent."""

PERMANENT: Final = (VERSIONED,)
PERMANENT_PATTERN: Final = "tm:(?:versions|version-cards):.+"
"""What `versions_key` and `cards_key` name: one of each for a model."""


def versions_key(model: str) -> str:
    """hash, `route` -> JSON Route, `spec:<version>` -> JSON VersionSpec; permanent.

    Args:
        model: Public name.
    """
    return f"tm:versions:{model}"


def cards_key(model: str) -> str:
    """hash, version -> JSON ModelCard as its workers say it; permanent.

    Args:
        model: Public name.
    """
    return f"tm:version-cards:{model}"


def hosts_key(model: str, version: str) -> str:
    """zset, host that starts or runs workers of a version -> ms at which it said so.

    Expires an hour after the last has.

    Args:
        model: Public name.
        version: The version.
    """
    return f"tm:version-hosts:{model}:{version}"
