"""Names in Redis of files and batches, which belong to a tenant and to no shard.

All of them expire.
"""

from typing import Final

OPEN_BATCHES: Final = "tm:batches:open"
"""zset, batch that has not ended -> Redis ms of its creation."""


def file_key(file_id: str) -> str:
    """string, JSON FileRecord."""
    return f"tm:file:{file_id}"


def files_key(tenant: str) -> str:
    """zset, id of a file of a tenant -> Redis ms of its creation."""
    return f"tm:files:{tenant}"


def batch_key(batch_id: str) -> str:
    """string, JSON BatchRecord."""
    return f"tm:batch:{batch_id}"


def batches_key(tenant: str) -> str:
    """zset, id of a batch of a tenant -> Redis ms of its creation."""
    return f"tm:batches:{tenant}"
