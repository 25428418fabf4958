"""Keys that would stay in Redis for ever."""

import re
from typing import Any

PERMANENT = re.compile(
    r"tm:(pool|models|shards|scripts|tokenizer:.+)"
    r"|tm:\{[^}]+\}:(lanes|resume|delayed|lease|deadline|groups|scheduler|load|recent"
    r"|done|dlq|limits|q:(interactive|bulk):[^:]+:\d+)"
)
"""Their number is bounded by the numbers of models, partitions and lanes."""


async def leaked_keys(client: Any) -> list[str]:
    """Names of keys without expiry that are not among the permanent ones.

    To be asked when every job is terminal; a correct pool then has none, except the
    hashes of groups that are alive, which carry an expiry and so are not listed.

    Args:
        client: A `redis.asyncio.Redis` that does not decode replies.
    """
    leaked = []
    async for raw in client.scan_iter(count=1000):
        name = raw.decode()
        if not PERMANENT.fullmatch(name) and await client.ttl(raw) == -1:
            leaked.append(name)
    return sorted(leaked)
