"""The scheduler process: one `ShardScheduler` for every shard of the pool."""

import asyncio
import os
import re
import signal
from typing import Final, cast

import msgspec
import redis.asyncio
import structlog

from ..shared.collector import settle
from ..shared.config import Config
from ..shared.keys import POOL, SHARDS, STORE, Keys, is_shard
from ..shared.messages import encode
from ..shared.metrics.serving import preload, shown
from ..shared.pool_card import pool_card
from ..shared.scripts import Scripts
from ..shared.tasks import end_tasks
from .outage import REDIS_ERRORS, Outage
from .shard import ShardScheduler
from .shown import QueueGauges
from .tokenizing import TokenizerThread

DISCOVER_S: Final = 1.0
"""How often new shards are looked for."""
PUBLISH_S: Final = 30.0
"""How often what the pool publishes of itself is checked."""
_PLACE: Final = re.compile(r"pool-[0-9a-f]{12}")
_log = structlog.get_logger(__name__)


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
        self._store_url = config.storage.url
        self._place = f"pool-{os.urandom(6).hex()}"
        self._dropped: set[bytes] = set()
        """Strange members of `tm:shards` that were told of."""

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
        """Writes the pool's card and the scripts' sources, again after a flush."""
        now = asyncio.get_running_loop().time()
        is_due = now - self._published_at >= PUBLISH_S
        if not is_due and await self._client.exists(POOL):
            return
        if self._store_url is not None:
            self._config = await self._with_own_store(self._store_url)
        card = encode(pool_card(self._config))
        if await self._client.get(POOL) != card:
            await self._client.set(POOL, card)
            _log.info("pool_card_published", partitions=self._config.pool.partitions)
        await Scripts(self._client, Keys("pool", 0)).publish_sources()
        self._published_at = now

    async def _with_own_store(self, url: str) -> Config:
        """Settings with this pool's own directory of the store.

        Each pool removes what its own Redis does not name, so that two which are given
        the same address must not see each other's inputs.
        """
        await self._client.set(STORE, self._place, nx=True)
        told = (await self._client.get(STORE) or b"").decode(errors="replace")
        if _PLACE.fullmatch(told):
            self._place = told
        own = f"{url.rstrip('/')}/{self._place}"
        storage = msgspec.structs.replace(self._config.storage, url=own)
        return msgspec.structs.replace(self._config, storage=storage)

    async def _discover(self) -> None:
        found = cast("set[bytes]", await self._client.smembers(SHARDS))  # type: ignore[misc]
        names: set[str] = set()
        for raw in found:
            name = raw.decode(errors="replace")
            if is_shard(name):
                names.add(name)
            else:
                await self._drop(raw)
        self._drop_ended()
        if lost := sorted(self._shards.keys() - names):
            # A flush took the set; jobs of these shards may be enqueued at any time.
            await self._client.sadd(SHARDS, *lost)  # type: ignore[misc]
        for shard in sorted(names - self._shards.keys()):
            scheduler = ShardScheduler(
                self._client, shard, self._config, self._tokenizers
            )
            self._shards[shard] = asyncio.create_task(scheduler.run(), name=shard)
            _log.info("shard_found", shard=shard)

    def _drop_ended(self) -> None:
        """Lets shards whose task has ended be found anew; none ever should."""
        for shard, task in list(self._shards.items()):
            if task.done():
                error = "cancelled" if task.cancelled() else repr(task.exception())
                _log.error("shard_ended", shard=shard, error=error)
                del self._shards[shard]

    async def _drop(self, raw: bytes) -> None:
        """Removes a member that no client of ours has written; it can have no jobs."""
        await self._client.srem(SHARDS, raw)  # type: ignore[misc]
        if raw not in self._dropped:
            self._dropped.add(raw)
            _log.warning(
                "shard_dropped",
                member=repr(raw[:80]),
                reason="expected <model>:<partition>, a model's name of letters, "
                "digits and . _ / - and a partition of 0 to 999",
            )

    async def _stop(self) -> None:
        await end_tasks(*self._shards.values())
        self._tokenizers.close()


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
    await preload(config)
    settle()
    try:
        gauges = QueueGauges(client, config)
        async with shown(client, config, "scheduler", ask=gauges):
            running = asyncio.create_task(scheduler.run(), name="pool")
            stopping = asyncio.create_task(stop.wait(), name="stop")
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if running.done():
                running.result()
            await end_tasks(running)
    finally:
        await client.aclose()
    _log.info("scheduler_stopped")
    return 0
