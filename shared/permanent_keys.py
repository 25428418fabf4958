"""Which names may stay in Redis for ever: all others have an expiry."""

import re
from typing import Final

from .adapter_keys import PERMANENT_ADAPTERS
from .bulk.keys import PERMANENT as BULK_PERMANENT
from .file_keys import FILES_PLACE
from .keys import (
    API_KEYS,
    HISTORY,
    JANITOR_QUEUE,
    MODELS,
    POOL,
    PROCESSES,
    SCRIPTS,
    SHARD,
    SHARDS,
    STORE,
    WARM,
)
from .version_keys import PERMANENT as VERSION_PERMANENT
from .version_keys import PERMANENT_PATTERN
from .webhook_keys import PERMANENT as WEBHOOK_PERMANENT

PERMANENT: Final = (
    *(POOL, STORE, MODELS, SHARDS, WARM, SCRIPTS, JANITOR_QUEUE, API_KEYS),
    *(PROCESSES, HISTORY, FILES_PLACE),
    *BULK_PERMANENT,
    *WEBHOOK_PERMANENT,
    *VERSION_PERMANENT,
)
"""Names that stay in Redis for ever; so does what `tokenizer_key`, `adapters_key`,
`versions_key` and `cards_key` name."""
PERMANENT_IN_SHARD: Final = (
    *("lanes", "resume", "delayed", "lease", "deadline", "groups", "scheduler"),
    *("load", "limits", "recent", "done", "dlq", "usage", "webhooks"),
)
"""The same of each shard, after its prefix; so do the streams of its lanes. Everything
else has an expiry."""

_PERMANENT: Final = re.compile(
    "|".join(map(re.escape, PERMANENT))
    + r"|tm:tokenizer:.+"
    + rf"|{PERMANENT_ADAPTERS}"
    + rf"|{PERMANENT_PATTERN}"
    + rf"|tm:\{{{SHARD.pattern}\}}:({'|'.join(PERMANENT_IN_SHARD)}"
    + r"|q:(interactive|bulk):[^:]+:\d+)"
)


def is_permanent(name: str) -> bool:
    """Whether a key may have no expiry.

    The number of such keys is bounded by those of models, partitions and lanes.
    """
    return _PERMANENT.fullmatch(name) is not None
