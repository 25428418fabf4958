"""What scheduler and janitor show of queues and bulk runs, read at a scrape.

The active scheduler of a shard alone shows that shard, so a sum over all processes
counts everything once, however many stand by.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, get_args

from ..shared.bulk.messages import RunState
from ..shared.bulk.store import list_runs
from ..shared.config import Config
from ..shared.keys import BEYOND, Keys
from ..shared.metrics import catalog
from ..shared.metrics.instruments import OTHER, Gauge, Labels
from ..shared.metrics.jobs import begin_counting
from ..shared.metrics.labels import know, model_label
from ..shared.model_terms import buckets_for
from ..shared.watch.reading import PoolReader
from ..shared.watch.replies import pipelined, whole
from ..shared.watch.shard import CLASSES
from ..shared.watch.snapshot import PoolSnapshot

if TYPE_CHECKING:
    import redis.asyncio

_Values = Mapping[Labels, float]
_QUEUE_GAUGES: Final = (
    *(catalog.QUEUE_JOBS, catalog.QUEUE_TOKENS, catalog.QUEUE_OLDEST),
    *(catalog.TENANT_JOBS, catalog.DELAYED, catalog.LEASED),
    *(catalog.DEAD_LETTERS, catalog.GROUPS, catalog.LEFT_OUT),
)
MOST_LANES: Final = 16_384
"""Lanes that a scrape counts; a shard has 2560 at most with five length buckets."""
LEFT_OUT: Final = ("shards", "lanes", "groups")
"""Of what there may be more than is counted."""
MOST_RUNS: Final = 200
"""Newest bulk runs that are counted."""
_ACTIVE: dict[str, bool] = {}
"""Shard -> whether this process schedules it; others stand by."""


def note_active(shard: str, active: bool) -> None:
    """Notes that this process schedules a shard, or stands by for it."""
    _ACTIVE[shard] = active


def forget_shard(shard: str) -> None:
    """Notes that this process has nothing to do with a shard any more."""
    _ACTIVE.pop(shard, None)


class RunGauges:
    """Counts the bulk runs that are kept, by state.

    Args:
        client: Redis.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client

    async def __call__(self) -> None:
        """Brings the gauge up to date.

        Raises:
            RedisUnavailable: Redis did not answer.
        """
        counts: Counter[Labels] = Counter({(state,): 0 for state in get_args(RunState)})
        try:
            for run in await list_runs(self._client, limit=MOST_RUNS):
                counts[run.state,] += 1
        except BaseException:
            catalog.BULK_RUNS.replace({})  # what was there before says nothing now
            raise
        catalog.BULK_RUNS.replace(counts)


class QueueGauges:
    """Reads the queues of the shards that this process schedules.

    Args:
        client: Redis.
        config: Settings: which tenants may be labels.
    """

    def __init__(self, client: "redis.asyncio.Redis", config: Config) -> None:
        self._read = pipelined(client)
        self._reader = PoolReader(self._read, most_ends=0, most_lanes=MOST_LANES)
        self._models = [model.name for model in config.models]
        self._tenants = tuple(config.tenants)
        self._config = config

    async def __call__(self) -> None:
        """Brings the gauges up to date, or empties them when Redis is away.

        Raises:
            RedisError: Redis did not answer.
        """
        catalog.ACTIVE.replace(
            {
                (model_label(keys.model), str(keys.partition)): float(is_active)
                for shard, is_active in _ACTIVE.items()
                for keys in (Keys.of_shard(shard),)
            }
        )
        shards = {Keys.of_shard(shard).model for shard in _ACTIVE}
        for model in map(model_label, shards.union(self._models)):
            begin_counting(model)
        active = {shard for shard, is_active in _ACTIVE.items() if is_active}
        try:
            seen = await self._reader.snapshot(active) if active else None
            named = await self._named(active)
        except BaseException:
            self._show(None, {})
            raise
        self._show(seen, named)

    async def _named(self, shards: Collection[str]) -> _Values:
        """Returns what waits of each tenant that the settings name."""
        jobs: Counter[Labels] = Counter({(name,): 0 for name in self._tenants})
        if not self._tenants or not shards:
            return jobs
        fields = [f"tenant:{name}:jobs" for name in self._tenants]
        loads = [Keys.of_shard(shard).load for shard in shards]
        for reply in await self._read(*(("HMGET", load, *fields) for load in loads)):
            counts = reply if isinstance(reply, list) else ()
            for name, count in zip(self._tenants, counts, strict=False):
                jobs[name,] += max(0, whole(count))
        return jobs

    def _show(self, seen: PoolSnapshot | None, named: _Values) -> None:
        """Replaces all at once: what is gone since has no series any more."""
        values = {} if seen is None else self._values(seen, named)
        for gauge in _QUEUE_GAUGES:
            gauge.replace(values.get(gauge, {}))

    def _values(self, seen: PoolSnapshot, named: _Values) -> dict[Gauge, _Values]:
        know(group.model for group in seen.groups if group.state != "silent")
        queued, oldest = _queues(seen, self._config)
        others = max(0, seen.waiting_jobs - sum(named.values()))
        tenants = {**named, (OTHER,): named.get((OTHER,), 0) + others}
        groups: Counter[Labels] = Counter(
            (model_label(one.model), one.state) for one in seen.groups
        )
        return {
            catalog.QUEUE_JOBS: queued,
            catalog.QUEUE_OLDEST: oldest,
            catalog.QUEUE_TOKENS: {(one.name,): one.tokens for one in seen.classes},
            catalog.TENANT_JOBS: tenants,
            catalog.LEFT_OUT: {(what,): what in seen.left_out for what in LEFT_OUT},
            catalog.GROUPS: groups,
            catalog.DELAYED: {(): seen.delayed},
            catalog.LEASED: {(): seen.leased},
            catalog.DEAD_LETTERS: {(): seen.dead_letters},
        }


def _queues(seen: PoolSnapshot, config: Config) -> tuple[_Values, _Values]:
    """Returns waiting jobs by bucket and the age of the oldest by class.

    Of a model that has workers everything is there at 0, so that a queue which empties
    is seen to.
    """
    served = {
        model_label(group.model): (*map(str, buckets_for(config, group.model)), BEYOND)
        for group in seen.groups
    }
    places = [(model, name) for model in served for name in CLASSES]
    oldest: dict[Labels, float] = dict.fromkeys(places, 0.0)
    queued: Counter[Labels] = Counter(
        {(*place, bucket): 0 for place in places for bucket in served[place[0]]}
    )
    for queue in seen.queues:
        model, job_class = model_label(queue.model), queue.job_class or OTHER
        queued[model, job_class, queue.bucket] += queue.jobs
        age_s = (queue.oldest_ms or 0) / 1000
        oldest[model, job_class] = max(age_s, oldest.get((model, job_class), 0.0))
    return queued, oldest
