"""How a worker makes itself known and keeps its leases: cards and heartbeats."""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
import redis.asyncio
import structlog

from ..shared import keys as names
from ..shared.adapters import in_memory
from ..shared.clock import RedisClock
from ..shared.keys import Keys
from ..shared.messages import DEFAULT_VERSION, SCHEMA_VERSION, ModelCard
from ..shared.outage import REDIS_ERRORS, Backoff, Outage
from ..shared.script_types import EngineCounters, GroupInfo
from ..shared.scripts import Scripts
from ..shared.version_keys import cards_key, versions_key
from ..shared.version_records import ROUTE
from .adapters_loader import NONE, AdapterStats
from .engine.request import Capacity
from .jobs import JobTable, RunningJob
from .token_rate import TokenRate

RENEW_BATCH: Final = 512
"""Leases renewed in one call."""
HEARTBEATS_PER_LEASE: Final = 3
"""Two may be lost or late before a lease ends."""
_SETTLING_S: Final = 0.5
"""By then the engine has counted that its last request is gone. It also bounds the
beats of a worker whose jobs come one by one."""


def counters(room: Capacity, adapters: AdapterStats = NONE) -> EngineCounters:
    """Returns what an engine has counted, as it is announced and logged."""
    return EngineCounters(
        free_blocks=room.free_blocks,
        num_running=room.num_running,
        prefill_backlog=room.prefill_backlog,
        overruns=room.overruns,
        steps=room.steps,
        scheduled_tokens=room.scheduled_tokens,
        pool_blocks=room.total_blocks,
        cached_blocks=room.cached_blocks,
        allocated_tokens=room.allocated_tokens,
        used_tokens=room.used_tokens,
        preemptions=room.preemptions,
        prefix_tokens_asked=room.prefix_tokens_asked,
        prefix_tokens_hit=room.prefix_tokens_hit,
        out_of_memory=room.out_of_memory,
        adapters=adapters.loaded,
        adapter_loads=adapters.loads,
        adapter_evictions=adapters.evictions,
    )


def drained(room: Capacity, adapters: AdapterStats) -> dict[str, object]:
    """Returns what is logged of an engine when its worker has drained."""
    return {
        **msgspec.structs.asdict(counters(room, adapters)),
        "total_blocks": room.total_blocks,
        "step_fit_ms": [round(part, 4) for part in room.step_fit_ms],
    }


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself."""

    group: str
    """This incarnation: random, new at each start, the owner of its leases."""
    card: ModelCard
    bundle: bytes | None
    """The tokenizer, packed; None for the `bytes` tokenizer."""
    block_size: int
    batch_tokens: int
    version: str = DEFAULT_VERSION
    """Of the model."""
    serves: str = "any"
    """`any`, or the prompts that it is kept for: `short` or `long`."""
    kv_overcommit: float = 1.0
    """Announced KV blocks as a multiple of those there are."""
    tp: int = 1
    """Processes that the model is split over."""


class Registration:
    """Announces one worker and renews its leases.

    Args:
        client: Redis, for the cards.
        scripts: Redis, for group and leases.
        keys: Names of the worker's shard.
        spec: What to announce.
        lease_ms: Length of a lease; also how long the group outlives its last sign.
        table: Jobs whose leases are renewed.
        capacity: The engine's room at this moment.
        adapters: What of adapters is in memory.
        output: Counts the tokens that come out of it.
        clock: Set by every reply.
        outage: Shared state of the connection.
        on_lost: Called with a job that another epoch owns by now.
        on_cancelled: Called with a job that somebody has cancelled.
    """

    def __init__(
        self,
        *,
        client: "redis.asyncio.Redis",
        scripts: Scripts,
        keys: Keys,
        spec: WorkerSpec,
        lease_ms: int,
        table: JobTable,
        capacity: Callable[[], Capacity],
        adapters: Callable[[], AdapterStats] = lambda: NONE,
        output: TokenRate | None = None,
        clock: RedisClock,
        outage: Outage,
        on_lost: Callable[[RunningJob], None],
        on_cancelled: Callable[[RunningJob], None],
    ) -> None:
        self._client = client
        self._scripts = scripts
        self._keys = keys
        self._spec = spec
        self._lease_ms = lease_ms
        self._table = table
        self._capacity = capacity
        self._adapters = adapters
        self._output = output or TokenRate()
        self._clock = clock
        self._outage = outage
        self._on_lost = on_lost
        self._on_cancelled = on_cancelled
        self._log = structlog.get_logger()
        self._draining = False
        self._silent = False
        self._beating = asyncio.Lock()

    async def announce(self) -> None:
        """Publishes the model's card and tokenizer and registers the group."""
        await self._publish_cards()
        now_ms = await self._scripts.register_group(
            self._spec.group, self._facts(), ttl_ms=self._lease_ms
        )
        self._clock.observe(now_ms)

    async def _publish_cards(self) -> None:
        spec = self._spec
        async with self._client.pipeline(transaction=False) as pipe:
            if spec.bundle is not None:
                pipe.set(names.tokenizer_key(spec.card.tokenizer), spec.bundle)
            pipe.sadd(names.SHARDS, self._keys.shard)
            await pipe.execute()
        await self._scripts.publish_card(spec.version, spec.card)

    async def _cards_are_there(self) -> bool:
        """False after a flush, or a restart of Redis that lost them."""
        spec = self._spec
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hexists(versions_key(spec.card.model), ROUTE)
            pipe.hexists(cards_key(spec.card.model), spec.version)
            pipe.hexists(names.MODELS, spec.card.model)
            pipe.sismember(names.SHARDS, self._keys.shard)
            if spec.bundle is not None:
                pipe.exists(names.tokenizer_key(spec.card.tokenizer))
            routed, own, shown, *others = await pipe.execute()
        # Where there is a route, producers may have nothing to do with this version.
        return bool(own if routed else shown) and all(others)

    def _facts(self) -> GroupInfo:
        spec, room, adapters = self._spec, self._capacity(), self._adapters()
        return GroupInfo(
            group=spec.group,
            total_blocks=int(room.total_blocks * spec.kv_overcommit),
            max_running=room.max_running,
            batch_tokens=spec.batch_tokens,
            block_size=spec.block_size,
            max_context=spec.card.max_context,
            weights_version=spec.card.weights_version,
            step_fit_ms=room.step_fit_ms,
            serves=spec.serves,
            version=spec.version,
            tokenizer=spec.card.tokenizer,
            tp=spec.tp,
            schema=SCHEMA_VERSION,
            state="draining" if self._draining else "ready",
            tokens_per_s=self._output.per_second(),
            output_tokens=self._output.total,
            counters=counters(room, adapters),
            adapters=in_memory(adapters.keys),
        )

    def drain(self) -> None:
        """Says from now on that this worker takes nothing new."""
        self._draining = True

    def fall_silent(self) -> None:
        """Gives no further sign of life: the leases are to end."""
        self._silent = True

    async def wait_silent(self) -> None:
        """Waits for a sign of life that is under way: it would make the group anew."""
        async with self._beating:
            return

    async def run(self) -> None:
        """Renews three times a lease until it is cancelled."""
        interval_s = self._lease_ms / 1000.0 / HEARTBEATS_PER_LEASE
        backoff = Backoff(longest_s=min(1.0, interval_s))
        while True:
            try:
                await self.beat()
            except REDIS_ERRORS as error:
                self._outage.failed("heartbeat", error)
                await backoff.wait()
            else:
                self._outage.recovered()
                backoff.reset()
                await self._until_next(interval_s)

    async def _until_next(self, interval_s: float) -> None:
        """Waits for the next beat, which comes early when the last job has left.

        Without it the counters of a busy moment would stand until the beat after.
        """
        idle = self._table.empty
        if idle.is_set():
            await asyncio.sleep(interval_s)
            return
        try:
            async with asyncio.timeout(interval_s):
                await idle.wait()
        except TimeoutError:
            return
        await asyncio.sleep(min(interval_s, _SETTLING_S))

    async def beat(self) -> None:
        """One sign of life: leases first, for they are what neighbours wait for."""
        jobs = list(self._table)
        for start in range(0, len(jobs), RENEW_BATCH):
            if not self._silent:
                await self._renew(jobs[start : start + RENEW_BATCH])
        async with self._beating:
            if not self._silent:
                await self._heartbeat()

    async def _renew(self, jobs: list[RunningJob]) -> None:
        answers = await self._scripts.renew(
            group=self._spec.group,
            lease_ms=self._lease_ms,
            jobs=[(job.id, job.epoch) for job in jobs],
        )
        for job, answer in zip(jobs, answers, strict=True):
            if not self._table.holds(job) or job.closing:
                continue  # the end that is being written tells what became of it
            if answer == "lost":
                self._on_lost(job)
            elif answer == "cancelled":
                self._on_cancelled(job)

    async def _heartbeat(self) -> None:
        if not await self._cards_are_there():
            self._log.warning("cards_published_again", model=self._spec.card.model)
            await self._publish_cards()
        now_ms = await self._scripts.heartbeat(
            self._spec.group, self._facts(), ttl_ms=self._lease_ms
        )
        self._clock.observe(now_ms)
