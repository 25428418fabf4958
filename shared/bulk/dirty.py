"""Says that a run has something to do, and wakes the orchestrator."""

import redis.asyncio

from ..redis import translate
from .keys import BELL, DIRTY


async def mark_dirty(client: "redis.asyncio.Redis", run: str) -> None:
    """Notes a run in the set of those with something to do, then rings.

    Args:
        client: Redis.
        run: Id of the run.

    Raises:
        RedisUnavailable: Redis did not answer.
    """
    with translate():
        pipe = client.pipeline(transaction=False)
        pipe.sadd(DIRTY, run)
        # Its being there is the message: whoever waits has seen the one before.
        pipe.xadd(BELL, {"run": run}, maxlen=1, approximate=False)
        await pipe.execute()
