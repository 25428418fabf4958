"""The last hour of a pool, one sample each ten seconds, written by the janitor."""

import asyncio
import math
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from ..shared.keys import HISTORY
from ..shared.messages import encode
from ..shared.metrics.catalog import HISTORY_SAMPLES
from ..shared.outage import REDIS_ERRORS
from ..shared.watch.reading import PoolReader
from ..shared.watch.replies import pipelined
from ..shared.watch.snapshot import HistorySample, PoolSnapshot

if TYPE_CHECKING:
    import redis.asyncio

EVERY_MS: Final = 10_000
SAMPLES: Final = 360
"""An hour of them is kept."""
_log = structlog.get_logger(__name__)


def sample_of(seen: PoolSnapshot) -> HistorySample:
    """Returns what is kept of a snapshot whose ends are of the last ten seconds."""
    latency = msgspec.structs.asdict(seen.latency)
    del latency["jobs"]
    return HistorySample(
        at_ms=seen.at_ms,
        tokens_per_s=round(seen.rates.tokens_per_s, 2),
        jobs_per_s=round(seen.rates.jobs_per_s, 2),
        failed_per_s=round(seen.rates.failed_per_s, 2),
        waiting={one.name: one.jobs for one in seen.classes},
        delayed=seen.delayed,
        running=seen.running,
        pool_blocks=sum(group.pool_blocks for group in seen.groups),
        used_blocks=sum(group.used_blocks for group in seen.groups),
        dead_letters=seen.dead_letters,
        **latency,
    )


class Sampler:
    """Writes `tm:history`.

    Several janitors write one sample for each ten seconds together: its entry's id is
    the time, and Redis refuses an id that is there already.

    Args:
        client: Redis.
        every_ms: Between two samples.
    """

    def __init__(
        self, client: "redis.asyncio.Redis", *, every_ms: int = EVERY_MS
    ) -> None:
        self._client = client
        self._every_ms = every_ms
        self._reader = PoolReader(pipelined(client), recent_ms=every_ms)

    async def run(self) -> None:
        """Samples until cancelled; a time at which Redis is away has no sample."""
        while True:
            wait_s = self._every_ms / 1000
            try:
                wait_s = await self.sample()
            except REDIS_ERRORS as error:
                _log.debug("no_sample", error=str(error) or repr(error))
            except Exception:  # noqa: BLE001 - arq's tasks must go on without history
                _log.exception("sample_failed")
            await asyncio.sleep(wait_s)

    async def sample(self) -> float:
        """Writes one sample; returns the seconds to the next."""
        seen = await self._reader.snapshot()
        slot = seen.at_ms // self._every_ms
        entry = encode(sample_of(seen))
        if await self._write(slot * self._every_ms, entry):
            HISTORY_SAMPLES.add()
        wait_ms = (slot + 1) * self._every_ms - seen.at_ms
        return math.ceil(wait_ms) / 1000

    async def _write(self, at_ms: int, entry: bytes) -> bool:
        import redis.exceptions

        try:
            await self._client.xadd(
                HISTORY,
                {"s": entry},
                id=f"{at_ms}-1",
                maxlen=SAMPLES,
                approximate=False,
            )
        except redis.exceptions.ResponseError as error:
            if "equal or smaller" not in str(error):
                raise
            return False  # another janitor was first
        return True
