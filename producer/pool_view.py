"""The pool as a producer sees it: settings, models, and who is alive."""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, cast

import msgspec

from ..shared.clock import redis_ms
from ..shared.errors import ModelUnavailable, ProtocolError, RedisUnavailable
from ..shared.keys import MODELS, POOL, Keys
from ..shared.messages import DEFAULT_MODEL, SCHEMA_VERSION, ModelCard, PoolCard
from ..shared.routes import Route
from ..shared.version_keys import versions_key
from ..shared.version_records import ROUTE, decode_route
from .info import ModelInfo
from .reading import read

if TYPE_CHECKING:
    import redis.asyncio

CARD_AGE_S: Final = 10.0
"""Settings and model cards are read again after this long."""
LIFE_AGE_S: Final = 1.0
"""A group seen alive is believed for this long; one not seen is looked for anew."""
HEARTBEAT_MS: Final = 15_000
"""A group whose heartbeat is older than this is dead."""
HEARD_S: Final = 10.0
"""A Redis that has run for less may not have heard its workers again."""

_MOST_MODELS: Final = 256
"""Names kept: a caller may try any number that do not exist."""
_log: Final = logging.getLogger("tokenmill.producer")
"""The standard library's: a caller's process decides what becomes of its messages."""
_Card = TypeVar("_Card", PoolCard, ModelCard)


@dataclass(slots=True)
class ModelView:
    """What is known of one model."""

    pool: PoolCard
    card: ModelCard | None
    live: frozenset[int]
    """Partitions with a live worker group."""
    route: Route
    """Who gets its jobs, and what takes no new ones."""
    read_at: float
    """`time.monotonic()` of the card."""
    live_at: float
    """`time.monotonic()` of `live` and `route`."""

    def is_old(self, now: float) -> bool:
        """Whether the card is to be read again; a missing one may come any moment."""
        return now - self.read_at > (CARD_AGE_S if self.card else LIFE_AGE_S)


class PoolView:
    """Reads and caches what submitting needs to know.

    Args:
        redis: Client; replies are bytes.
    """

    def __init__(self, redis: "redis.asyncio.Redis") -> None:
        self._redis = redis
        self._pool: PoolCard | None = None
        self._pool_at = 0.0
        self._models: dict[str, ModelView] = {}

    async def pool(self) -> PoolCard:
        """Returns the pool's settings; a pool that published none has the defaults."""
        now = time.monotonic()
        if self._pool is None or now - self._pool_at > CARD_AGE_S:
            raw = await self._redis.get(POOL)
            if raw is None:
                # The defaults name one partition, which every pool has, so a job
                # that is enqueued so is not lost.
                _log.warning(
                    "%s is missing: no pool was ever started on this Redis; "
                    "going on with default settings",
                    POOL,
                )
            self._pool = PoolCard() if raw is None else _decode(raw, PoolCard, POOL)
            self._pool_at = now
        return self._pool

    async def default_model(self) -> str:
        """Returns the model of a request that names none; see `default_of`."""
        pool = await self.pool()
        (names,) = await read(self._redis, ("HKEYS", MODELS))
        return default_of(pool, [name.decode() for name in names])

    async def model(self, name: str, *, fresh_life: bool = False) -> ModelView:
        """Returns what is known of a model.

        Args:
            name: The model's public name.
            fresh_life: Look for live groups now, whatever is cached.
        """
        now = time.monotonic()
        view = self._models.get(name)
        if view is None or view.is_old(now) or (fresh_life and view.card is None):
            pool = await self.pool()
            (raw,) = await read(self._redis, ("HGET", MODELS, name))
            card = None if raw is None else _decode(raw, ModelCard, MODELS)
            live, route = await self._life(name, pool.partitions)
            view = ModelView(pool, card, live, route, now, now)
            if len(self._models) >= _MOST_MODELS:
                self._models.clear()
            self._models[name] = view
        elif fresh_life or now - view.live_at > LIFE_AGE_S:
            view.live, view.route = await self._life(name, view.pool.partitions)
            view.live_at = now
        return view

    async def open_model(self, name: str) -> ModelView:
        """Returns what is known of a model that takes jobs.

        Raises:
            ModelUnavailable: It retires.
        """
        view = await self.model(name)
        if view.route.retiring:
            raise ModelUnavailable(
                f"the model '{name}' retires and takes no new jobs",
                "Choose another; tokenmill models load takes it back",
                is_known=False,  # asking again later does not help
            )
        return view

    async def require_served(self, name: str, partitions: set[int]) -> None:
        """Checks that live workers serve a model.

        Args:
            name: The model's public name.
            partitions: Those in which jobs are to be enqueued.

        Raises:
            ModelUnavailable: There is none in at least one of them.
            RedisUnavailable: There was one, and Redis has only just come back.
        """
        view = await self.model(name)
        if not partitions <= view.live:
            view = await self.model(name, fresh_life=True)
        if partitions <= view.live:
            return
        await self._require_heard(name, partitions)
        served = sorted(m.name for m in await self.models() if m.num_groups)
        known = view.card is not None or name in view.pool.models
        cause = "has no live worker" if known else "is not known to this pool"
        other = f"model='{served[0]}', --model {served[0]}" if served else ""
        raise ModelUnavailable(
            f"the model '{name}' {cause}; served now: {', '.join(served) or 'none'}",
            (f"Name one that is served ({other}), start" if other else "Start")
            + " a worker for it, or wait for one (when_unserved='wait', on the command "
            "line --wait-for-worker)",
            is_known=known,
        )

    async def _require_heard(self, name: str, partitions: set[int]) -> None:
        """Raises while workers may not have told Redis yet that they outlived it."""
        from redis.exceptions import ResponseError  # late: it makes imports slow

        groups = [("ZCARD", Keys(name, partition).groups) for partition in partitions]
        if not all(await read(self._redis, *groups)):
            return
        try:
            uptime_s = (await self._redis.info("server"))["uptime_in_seconds"]
        except ResponseError as error:
            _log.debug("INFO is refused, so outages cannot be told: %s", error)
            return
        if uptime_s < HEARD_S:
            raise RedisUnavailable(
                f"Redis has been back for {uptime_s} s and has not heard of a worker "
                f"of '{name}' yet; try again in a moment"
            )

    async def models(self) -> list[ModelInfo]:
        """Returns every model that is configured or was ever served, by name."""
        pool = await self.pool()
        (raw_cards,) = await read(self._redis, ("HGETALL", MODELS))
        cards = {
            name.decode(): _decode(raw, ModelCard, MODELS)
            for name, raw in cast("dict[bytes, bytes]", raw_cards).items()
        }
        infos = []
        for name in sorted({*cards, *pool.models}):
            counts, _ = await self._counts(name, pool.partitions)
            num_groups = sum(counts)
            infos.append(
                ModelInfo(
                    name=name,
                    num_groups=num_groups,
                    configured=name in pool.models,
                    card=cards.get(name),
                )
            )
        return infos

    async def _life(self, name: str, partitions: int) -> tuple[frozenset[int], Route]:
        """Partitions with a live group, and the route."""
        counts, route = await self._counts(name, partitions)
        live = frozenset(p for p, count in enumerate(counts) if count)
        try:
            return live, decode_route(route, name)
        except ProtocolError:
            return live, Route()  # doctor says so; jobs can be queued all the same

    async def _counts(
        self, name: str, partitions: int
    ) -> tuple[list[int], bytes | None]:
        """Live groups of each partition, by the clock of Redis, and the route."""
        oldest = await redis_ms(self._redis) - HEARTBEAT_MS
        *counts, route = await read(
            self._redis,
            *(
                ("ZCOUNT", Keys(name, partition).groups, oldest, "+inf")
                for partition in range(partitions)
            ),
            ("HGET", versions_key(name), ROUTE),
        )
        return counts, route


def default_of(pool: PoolCard, known: Collection[str]) -> str:
    """Returns the model that is meant where none is named.

    Args:
        pool: The pool's settings.
        known: Names of all models that were ever served.

    Returns:
        The only model that the pool is configured for (without settings: that it ever
        served), or the package's default where there are several, or none.
    """
    names = list(pool.models or known)
    return names[0] if len(names) == 1 else DEFAULT_MODEL


def _decode(raw: bytes, kind: type[_Card], key: str) -> _Card:
    try:
        card = msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{key} cannot be read: {error}") from error
    if card.v > SCHEMA_VERSION:
        raise ProtocolError(
            f"{key} has schema version {card.v}; this client reads up to "
            f"{SCHEMA_VERSION}: upgrade tokenmill here"
        )
    return card
