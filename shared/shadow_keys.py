"""Names in Redis of what is known of copied traffic; all of them expire."""

from typing import Final

SHADOW_TENANT: Final = "tokenmill.shadow"
"""Owns all copies, so that they count for no tenant of users."""


def shadow_key(model: str, version: str) -> str:
    """hash, counters of the copies to a version; expires after a month without any.

    Args:
        model: Public name.
        version: That which is tried.
    """
    return f"tm:shadow:{model}:{version}"


def samples_key(model: str, version: str) -> str:
    """list, the newest JSON ShadowSamples, newest first; expires likewise.

    Args:
        model: Public name.
        version: That which is tried.
    """
    return f"tm:shadow-samples:{model}:{version}"


def source_key(job_id: str) -> str:
    """string, id of the job that a copy was made from; expires after two hours.

    Args:
        job_id: Of the copy.
    """
    return f"tm:shadow-source:{job_id}"
