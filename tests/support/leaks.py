"""Keys that would stay in Redis for ever."""

from typing import Any

from tokenmill.shared.permanent_keys import is_permanent


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
        if not is_permanent(name) and await client.ttl(raw) == -1:
            leaked.append(name)
    return sorted(leaked)
