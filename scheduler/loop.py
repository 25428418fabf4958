"""The scheduler process: one `ShardScheduler` for every shard of the pool."""

import asyncio
import signal
from typing import Final, cast

import redis.asyncio
import structlog

from ..shared.collector import settle
from ..shared.config import Config
from ..shared.keys import MODEL_NAME, POOL, SHARDS, Keys
from ..shared.messages import PoolCard, encode
from ..shared.scripts import Scripts
from .outage import REDIS_ERRORS, Outage
from .shard import ShardScheduler
from .tokenizing import TokenizerThread

DISCOVER_S: Final = 1.0
"""How often new shards are looked for."""
PUBLISH_S: Final = 30.0
"""How often what the pool publishes of itself is checked: a flush removes it."""
_log = structlog.get_logger(__name__)


def pool_card(config: Config) -> PoolCard:
    """Returns what producers need to know of the pool."""
    limits = config.limits
    return PoolCard(
        partitions=config.pool.partitions,
        buckets=config.pool.buckets,
        max_waiting_jobs=limits.max_waiting_jobs,
        max_waiting_tokens=limits.max_waiting_tokens,
        tenant_waiting_jobs=limits.tenant_waiting_jobs,
        max_payload_bytes=limits.max_payload_bytes,
        retention_ms=round(config.retention.result_s * 1000),
        models=tuple(model.name for model in config.models),
    )


class PoolScheduler:
    """Schedules every shard that exists or appears.

    Args:
        client: Redis.
        config: The pool's settings.
        standby: Lets another scheduler that starts at the same time go first.
    """

    def __init__(
        self, client: "redis.asyncio.Redis", config: Config, *, standby: bool = False
    ) -> None:
        self._client = client
        self._config = config
        self._standby = standby
        self._tokenizers = TokenizerThread()
        self._outage = Outage("pool")
        self._shards: dict[str, asyncio.Task[None]] = {}
        self._published_at = -PUBLISH_S

    async def run(self) -> None:
        """Runs until cancelled; every lease is then given back."""
        try:
            if self._standby:
                await asyncio.sleep(self._config.scheduler.leader_lease_ms / 1000)
            while True:
                try:
                    await self._publish()
                    await self._discover()
                    self._outage.over()
                except REDIS_ERRORS as error:
                    await self._outage.wait(error)
                    self._published_at = -PUBLISH_S
                    continue
                await asyncio.sleep(DISCOVER_S)
        finally:
            await self._stop()

    async def _publish(self) -> None:
        """Writes the pool's card and the scripts' sources, now and then again."""
        now = asyncio.get_running_loop().time()
        if now - self._published_at < PUBLISH_S:
            return
        card = encode(pool_card(self._config))
        if await self._client.get(POOL) != card:
            await self._client.set(POOL, card)
            _log.info("pool_card_published", partitions=self._config.pool.partitions)
        await Scripts(self._client, Keys("pool", 0)).publish_sources()
        self._published_at = now

    async def _discover(self) -> None:
        found = cast("set[bytes]", await self._client.smembers(SHARDS))  # type: ignore[misc]
        names = {shard for raw in found if (shard := _shard_name(raw)) is not None}
        for shard in sorted(names - self._shards.keys()):
            scheduler = ShardScheduler(
                self._client, shard, self._config, self._tokenizers
            )
            self._shards[shard] = asyncio.create_task(scheduler.run(), name=shard)
            _log.info("shard_found", shard=shard)

    async def _stop(self) -> None:
        for task in self._shards.values():
            task.cancel()
        await asyncio.gather(*self._shards.values(), return_exceptions=True)
        self._tokenizers.close()


def _shard_name(raw: bytes) -> str | None:
    """Returns a member of `tm:shards`, or None for one that names no shard."""
    model, _, partition = raw.decode(errors="replace").rpartition(":")
    if MODEL_NAME.fullmatch(model) and partition.isdecimal() and len(partition) <= 3:
        return f"{model}:{partition}"
    _log.warning("no_such_shard", member=repr(raw[:80]))
    return None


async def serve(client: "redis.asyncio.Redis", config: Config, *, standby: bool) -> int:
    """Runs the scheduler until SIGINT or SIGTERM.

    Args:
        client: Redis; closed at the end.
        config: The pool's settings.
        standby: See `PoolScheduler`.

    Returns:
        The exit status.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    scheduler = PoolScheduler(client, config, standby=standby)
    settle()
    running = asyncio.create_task(scheduler.run(), name="pool")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    try:
        if running.done():
            running.result()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    finally:
        await client.aclose()
    _log.info("scheduler_stopped")
    return 0
