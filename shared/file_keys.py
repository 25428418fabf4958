"""Names in Redis of files and batches, which belong to a tenant and to no shard.

All of them expire but `FILES_PLACE`. Whatever is no tenant's own has a name that no
tenant can have.
"""

from typing import Final

FILES_PLACE: Final = "tm:file:place"
"""string, this pool's own directory in the store of files; permanent."""
OPEN_BATCHES: Final = "tm:batch:open"
"""zset, batch that has not ended -> Redis ms of its creation."""


def file_key(file_id: str) -> str:
    """string, JSON FileRecord."""
    return f"tm:file:{file_id}"


def files_key(tenant: str) -> str:
    """zset, id of a file of a tenant -> Redis ms of its creation."""
    return f"tm:files:{tenant}"


def arriving_key(tenant: str) -> str:
    """zset, `<id>:<bytes>` of an upload -> Redis ms until which it counts."""
    return f"tm:file:arriving:{tenant}"


def batch_key(batch_id: str) -> str:
    """string, JSON BatchRecord."""
    return f"tm:batch:{batch_id}"


def batches_key(tenant: str) -> str:
    """zset, id of a batch of a tenant -> Redis ms of its creation."""
    return f"tm:batches:{tenant}"
