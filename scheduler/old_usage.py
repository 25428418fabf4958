"""Removing what tenants have used once it is older than `retention.usage_days`."""

import asyncio
from typing import Final, cast

import redis.asyncio
import redis.exceptions

from ..shared.clock import redis_ms
from ..shared.keys import Keys
from ..shared.script_runner import text
from ..shared.usage import day_and_tenant, day_of

SCAN_COUNT: Final = 500
SCAN_PAUSE_S: Final = 0.01
"""Between two parts of a scan: the queue comes first."""


async def remove_old_usage(
    client: "redis.asyncio.Redis", keys: Keys, days: int
) -> dict[str, int]:
    """Removes days that are over long ago.

    Args:
        client: Redis.
        keys: The shard's names.
        days: How many stay, today included.

    Returns:
        How many fields went.
    """
    first, cursor, removed = day_of(await redis_ms(client)) - days + 1, 0, 0
    while True:
        try:
            cursor, row = await client.hscan(keys.usage, cursor, count=SCAN_COUNT)
        except redis.exceptions.ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            return {"usage": 0}  # a stranger's key: doctor names it
        old = [field for field in row if _is_before(field, first)]
        if old:
            removed += cast("int", await client.hdel(keys.usage, *old))  # type: ignore[misc]
        if not cursor:
            return {"usage": removed}
        await asyncio.sleep(SCAN_PAUSE_S)


def _is_before(field: bytes, first: int) -> bool:
    found = day_and_tenant(text(field))
    return found is not None and found[0] < first
