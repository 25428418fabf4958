"""Names in Redis of webhooks that are to be delivered or were.

Those of jobs are found by their shard's `webhooks` (see `keys.py`) as well.
"""

import re
from typing import Final

ANNOUNCED: Final = "tm:webhooks"
"""Stream of what is to be delivered and was not taken yet: fields id, url, type and
data, or id and again; permanent, trimmed."""
OPEN: Final = "tm:webhooks:open"
"""zset, id of a delivery that is not settled -> ms of its next attempt; permanent."""
LOG: Final = "tm:webhooks:log"
"""zset, id of a delivery -> Redis ms of its last change; the newest 10,000,
permanent."""
QUEUE: Final = "tm:arq:webhooks"
"""zset, arq's queue of deliveries; permanent."""

PERMANENT: Final = (ANNOUNCED, OPEN, LOG, QUEUE)
"""Names that stay in Redis for ever; `keys.py` takes them over."""

EVENT_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/-]{0,199}")
"""The id of a job's event is the job's."""


def delivery_key(event_id: str) -> str:
    """hash, one delivery: see `webhooks.Delivery`; expires after a week."""
    return f"tm:webhook:{event_id}"
