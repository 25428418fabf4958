"""Redis away, for one loop of the scheduler: what is logged and how long it waits."""

from ..shared.outage import FIRST_WAIT_S, REDIS_ERRORS, Backoff
from ..shared.outage import Outage as Connection

__all__ = ["REDIS_ERRORS", "Outage"]


class Outage:
    """How long Redis has been away, for one shard.

    Args:
        shard: For the log.
    """

    def __init__(self, shard: str) -> None:
        self._connection = Connection(shard=shard)
        self._backoff = Backoff(floor_s=FIRST_WAIT_S)

    async def wait(self, error: BaseException) -> None:
        """Notes a failure and waits before the next try: full jitter, doubling."""
        self._connection.failed(None, error)
        await self._backoff.wait()

    def over(self) -> None:
        """Notes that Redis answers."""
        self._connection.recovered()
        self._backoff.reset()
