"""The scheduler of one shard: standby, then leader, then standby again."""

import asyncio
import secrets
from typing import Final, cast

import redis.asyncio
import structlog

from ..shared.config import Config
from ..shared.keys import WARM, Keys
from ..shared.messages import SCHEMA_VERSION, JobClass
from ..shared.model_terms import buckets_for, limits_for
from ..shared.scripts import Scripts
from ..shared.versions import Versions
from .adapter_keeping import AdapterKeeper
from .bell import listen
from .cards import CardReader
from .clock import ArrivalRate, RedisClock
from .dispatching import Dispatcher
from .endings import EndLog
from .ends_rate import EndsRate
from .groups import GroupReader
from .intake import Intake
from .keeping import ADAPTERS_EVERY_S, ROUTE_EVERY_S, keep
from .large_inputs import TooNew
from .leader import Leadership, LeadershipLost
from .learning import MadeRatio
from .limits import keep_limits
from .outage import REDIS_ERRORS, Outage, restart_grace_s
from .reading import LaneReader
from .reaper import Reaper
from .refusing import Refuser
from .shown import forget_shard, note_active
from .tokenizing import TokenizerThread
from .waiting import WaitingRoom

RESTART_S: Final = 1.0
"""Wait after a failure that is neither Redis nor leadership: a bug, logged in full."""
SETTLE_S: Final = 2.0
"""All parts working for this long end an outage."""
RELEASE_S: Final = 2.0
"""Longest time spent on giving the lease back; it ends by itself otherwise."""
WARM_EVERY_S: Final = 1.0
"""Between two looks at which tokenizer the model's workers name."""
_log = structlog.get_logger(__name__)


class ShardScheduler:
    """Schedules one shard for as long as it holds the lease.

    Args:
        client: Redis.
        shard: Member of `tm:shards`.
        config: The pool's settings.
        tokenizers: The process's tokenizer thread.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        shard: str,
        config: Config,
        tokenizers: TokenizerThread,
    ) -> None:
        self._client = client
        self._keys = Keys.of_shard(shard)
        self._config = config
        self._tokenizers = tokenizers
        self._scripts = Scripts(client, self._keys)
        self._outage = Outage(shard)
        self._too_new = TooNew(shard)
        self._fence: int | None = None
        self._owner = f"s-{secrets.token_hex(8)}"
        self._leadership = Leadership(
            self._scripts, self._owner, config.scheduler.leader_lease_ms
        )

    async def run(self) -> None:
        """Runs until cancelled; then gives the lease back."""
        beside = [asyncio.create_task(self._warm())]
        if self._keys.partition == 0:
            # No part of leading: who loses Redis' memory loses the lease as well.
            model = self._keys.model
            route = Versions(self._client, model)
            adapters = AdapterKeeper(self._client, model)
            beside += [
                asyncio.create_task(keep(route, ROUTE_EVERY_S, "route", model)),
                asyncio.create_task(
                    keep(adapters, ADAPTERS_EVERY_S, "adapters", model)
                ),
            ]
        try:
            while True:
                await self._once()
        finally:
            for task in beside:
                task.cancel()
            forget_shard(self._keys.shard)
            await self._release()

    async def _warm(self) -> None:
        """Loads the tokenizer when a worker names it, not when the first job waits.

        A worker names it before it loads its weights, so both load at once. A standby
        does so too: after a takeover the next job waits for nothing.
        """
        cards = CardReader(self._client, self._keys.model)
        while True:
            try:
                await self._warm_up(cards)
            except REDIS_ERRORS as error:
                _log.debug("warming_waits_for_redis", error=str(error))
            except Exception:  # noqa: BLE001 - the first job will try again
                _log.exception("warming_failed", shard=self._keys.shard)
            await asyncio.sleep(WARM_EVERY_S)

    async def _warm_up(self, cards: CardReader) -> None:
        model = self._keys.model
        early = await self._client.hget(WARM, model)  # type: ignore[misc]
        card = await cards.current()
        if early is not None:
            name = cast("bytes", early).decode(errors="replace")
            await self._tokenizers.load(self._client, model, name)
        if card is not None:
            await self._tokenizers.ready(self._client, card)

    async def _once(self) -> None:
        """One turn as standby and leader; whatever ends it, the next starts clean."""
        try:
            note_active(self._keys.shard, False)
            fence = await self._leadership.wait(self._outage.over)
            note_active(self._keys.shard, True)
            if fence != self._fence:
                _log.info("active", shard=self._keys.shard, fence=fence)
            self._fence = fence
            # A task of its own: before Python 3.13 a task whose group failed counts as
            # being cancelled ever after, and timeouts in it may do harm.
            await asyncio.create_task(self._lead(fence), name=f"lead {fence}")
        except* LeadershipLost:
            _log.warning("leadership_lost", shard=self._keys.shard)
        except* REDIS_ERRORS as group:
            await self._outage.wait(group.exceptions[0])
        except* Exception as group:  # noqa: BLE001 - other shards must go on
            _log.exception("scheduler_failed", shard=self._keys.shard, exc_info=group)
            await asyncio.sleep(RESTART_S)

    async def _settle(self) -> None:
        """Ends an outage only once all parts have worked for a while.

        A call that Redis goes on refusing then meets a growing backoff, logged once.
        """
        await asyncio.sleep(SETTLE_S)
        self._outage.over()

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._leadership.release()
        except REDIS_ERRORS as error:
            _log.warning("lease_not_released", shard=self._keys.shard, error=str(error))

    async def _lead(self, fence: int) -> None:
        """Runs all parts until one fails. All state is new and starts at entry 0."""
        room, arrivals, clock = WaitingRoom(), ArrivalRate(), RedisClock()
        clock.observe(*await self._client.time())
        restarted_s = await restart_grace_s(self._client, self._keys)
        grace_s = max(self._outage.grace_s(), restarted_s)
        # For `doctor`, which names jobs of a version that this scheduler cannot read.
        await self._client.hset(self._keys.scheduler, "schema", str(SCHEMA_VERSION))  # type: ignore[misc]
        refuser = Refuser(self._scripts, fence)
        groups = GroupReader(self._client, self._keys)
        made = MadeRatio(self._client, self._keys)
        dispatcher = self._dispatcher(
            fence, groups, room, refuser, clock, arrivals, made
        )
        intakes = self._intakes(
            groups, room, refuser, clock, arrivals, dispatcher.changed
        )
        reaper = Reaper(
            client=self._client,
            scripts=self._scripts,
            keys=self._keys,
            fence=fence,
            clock=clock,
            max_losses_alone=self._config.scheduler.max_losses_alone,
            dead_ms=round(self._config.retention.dead_s * 1000),
            grace_s=grace_s,
        )
        bells = [dispatcher.changed, *(intake.bell for intake in intakes)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._settle())
            tasks.create_task(made.run())
            tasks.create_task(EndsRate(self._client, self._keys).run())
            tasks.create_task(self._leadership.keep(fence))
            tasks.create_task(
                keep_limits(
                    self._scripts, GroupReader(self._client, self._keys), self._config
                )
            )
            tasks.create_task(listen(self._client, self._keys.bell, bells))
            tasks.create_task(dispatcher.run())
            tasks.create_task(reaper.run())
            tasks.create_task(EndLog(self._client, self._keys).run())
            for intake in intakes:
                tasks.create_task(intake.run())

    def _intakes(
        self,
        groups: GroupReader,
        room: WaitingRoom,
        refuser: Refuser,
        clock: RedisClock,
        arrivals: ArrivalRate,
        changed: asyncio.Event,
    ) -> list[Intake]:
        """One for each class, so that bulk text does not delay a short question."""
        cards = CardReader(self._client, self._keys.model)
        return [
            Intake(
                client=self._client,
                keys=self._keys,
                reader=LaneReader(
                    self._client,
                    self._keys,
                    job_class,
                    room,
                    self._config.scheduler.read_ahead,
                ),
                groups=groups,
                room=room,
                tokenizers=self._tokenizers,
                cards=cards,
                refuser=refuser,
                clock=clock,
                arrivals=arrivals,
                buckets=buckets_for(self._config, self._keys.model),
                max_bytes=limits_for(self._config, self._keys.model).max_payload_bytes,
                changed=changed,
                config=self._config,
                too_new=self._too_new,
            )
            for job_class in JobClass
        ]

    def _dispatcher(
        self,
        fence: int,
        groups: GroupReader,
        room: WaitingRoom,
        refuser: Refuser,
        clock: RedisClock,
        arrivals: ArrivalRate,
        made: MadeRatio,
    ) -> Dispatcher:
        settings = self._config.scheduler
        return Dispatcher(
            client=self._client,
            scripts=self._scripts,
            keys=self._keys,
            fence=fence,
            name=f"{self._owner}-{fence}",
            groups=groups,
            room=room,
            refuser=refuser,
            clock=clock,
            arrivals=arrivals,
            max_wait_ms=settings.max_wait_ms,
            weights={
                name: tenant.weight for name, tenant in self._config.tenants.items()
            },
            short_tokens=self._config.pool.short_tokens,
            made=made,
            tick_s=settings.tick_ms / 1000,
            lease_ms=self._config.worker.lease_ms,
        )
