"""Leases, deadlines and delays that have passed, looked at when they are due."""

import asyncio
from typing import Final, cast

import redis.asyncio
import structlog

from ..shared.keys import Keys
from ..shared.metrics.catalog import DEAD, LEASES_LOST
from ..shared.metrics.labels import model_label
from ..shared.scripts import ReapReport, Scripts
from .clock import RedisClock
from .leader import LeadershipLost

LONGEST_S: Final = 0.5
"""Longest time between two looks: a due time may be set meanwhile."""
SHORTEST_S: Final = 0.02
FULL_EVERY_S: Final = 5.0
"""Silent groups are looked for this often even when no job is due."""
LIMIT: Final = 512
"""Jobs of each kind in one reap."""
_log = structlog.get_logger(__name__)


class Reaper:
    """Redelivers, expires and queues what is due.

    Args:
        client: Redis.
        scripts: The shard's scripts.
        keys: Its names.
        fence: The active scheduler's number.
        clock: Set by every look.
        max_losses_alone: Leases lost while a job ran alone before it fails.
        dead_ms: How long the record, input and result of a dead letter stay.
        grace_s: Wait before the first look: after an outage of Redis workers that live
            renew their leases first.
    """

    def __init__(
        self,
        *,
        client: "redis.asyncio.Redis",
        scripts: Scripts,
        keys: Keys,
        fence: int,
        clock: RedisClock,
        max_losses_alone: int,
        dead_ms: int,
        grace_s: float = 0.0,
    ) -> None:
        self._client = client
        self._scripts = scripts
        self._keys = keys
        self._fence = fence
        self._clock = clock
        self._max_losses_alone = max_losses_alone
        self._dead_ms = dead_ms
        self._grace_s = grace_s
        self._full_at = 0.0

    async def run(self) -> None:
        """Reaps until cancelled."""
        await asyncio.sleep(self._grace_s)
        while True:
            wait_s = await self.step()
            await asyncio.sleep(wait_s)

    async def step(self) -> float:
        """Reaps if something is due; returns the seconds to the next look."""
        due_ms = await self._next_due_ms()
        now = asyncio.get_running_loop().time()
        if due_ms > 0 and now - self._full_at < FULL_EVERY_S:
            return min(max(due_ms / 1000, SHORTEST_S), LONGEST_S)
        self._full_at = now
        report = await self._scripts.reap(
            fence=self._fence,
            limit=LIMIT,
            max_losses_alone=self._max_losses_alone,
            dead_ms=self._dead_ms,
        )
        if report.fenced:
            raise LeadershipLost
        # What is due and cannot be acted on must not make this a busy loop.
        return SHORTEST_S if _tell(self._keys.shard, report) else LONGEST_S

    async def _next_due_ms(self) -> float:
        """Milliseconds to the earliest due time; infinite when there is none."""
        pipe = self._client.pipeline(transaction=False)
        pipe.time()
        for key in (self._keys.lease, self._keys.deadline, self._keys.delayed):
            pipe.zrange(key, 0, 0, withscores=True)
        (seconds, microseconds), *firsts = await pipe.execute()
        self._clock.observe(int(seconds), int(microseconds))
        now_ms = self._clock.now_ms()
        rows = cast("list[list[tuple[bytes, float]]]", firsts)
        scores = [score for row in rows for _, score in row]
        return min((score - now_ms for score in scores), default=float("inf"))


def _tell(shard: str, report: ReapReport) -> bool:
    """Logs what a reap did; whether it did anything."""
    counts = {
        name: getattr(report, name)
        for name in ("redelivered", "dead", "expired", "due", "cancelled", "groups")
        if getattr(report, name)
    }
    if counts:
        _log.info("reaped", shard=shard, **counts)
        model = model_label(Keys.of_shard(shard).model)
        LEASES_LOST.add(model, by=report.redelivered + report.dead + report.cancelled)
        DEAD.add(model, by=report.dead)
    for job in report.dead_jobs:
        _log.warning("job_given_up", job=job.job_id, **{job.reason: job.losses})
    for job_id in report.dropped:
        _log.error("record_unusable", shard=shard, job=job_id)
    return bool(counts)
