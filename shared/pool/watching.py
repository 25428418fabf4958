"""What the supervisor learns from Redis about its children, and does there for them."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import redis.asyncio
import redis.exceptions

from ..errors import TokenmillError
from ..keys import SHARDS, Keys
from ..losses import process_ended
from ..metrics.targets import cards_of
from ..process_card import ProcessCard
from ..scripts import Scripts
from .lines import line
from .plan import GATEWAY, GROUP_VARIABLE, model_of_worker, partition_of_worker
from .processes import Child, ChildState

_LOOK_EVERY_S: Final = 0.2
_ALIVE_IS_WELL_S: Final = 2.0
"""A child without a sign of its own in Redis is taken to run after this long."""
_FORFEIT_TIMEOUT_S: Final = 5.0
_DEATHS: Final = 2


class Watcher:
    """Confirms children that start, until each was seen to do its work.

    Args:
        client: Redis.
        children: All of the pool.
        on_ready: Called once, when every model is served that can be.
        on_served: Called with each model whose first worker was seen.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        children: Sequence[Child],
        on_ready: Callable[[], None],
        on_served: Callable[[str], None] = lambda _model: None,
    ) -> None:
        self._client = client
        self._children = children
        self._on_ready = on_ready
        self._on_served = on_served
        self.served: set[str] = set()
        """Models of which a worker has been seen."""
        self._started = asyncio.Event()
        self.serves = False
        """Whether a scheduler and, where there are any, a worker have been seen."""
        self.ready = False
        """Whether it serves every model whose workers do not fail, over HTTP too where
        it is to."""

    def look(self) -> None:
        """Says that a child has been started."""
        self._started.set()

    async def run(self) -> None:
        """Confirms until it is cancelled; sleeps while nothing starts."""
        while True:
            self._started.clear()
            starting = [
                child
                for child in self._children
                if child.state in {ChildState.STARTING, ChildState.WAITING}
            ]
            for child in starting:
                with contextlib.suppress(redis.exceptions.RedisError, OSError):
                    if child.pid is not None and await self._works(child):
                        child.confirm()
            self._note_served()
            comes = self.awaited or self._gateway_comes()
            if self.serves and not self.ready and not comes:
                self.ready = True
                self._on_ready()
            if starting:
                await asyncio.sleep(_LOOK_EVERY_S)
            else:
                await self._started.wait()

    async def _works(self, child: Child) -> bool:
        if child.spec.name == GATEWAY:
            cards = await cards_of(self._client)
            return any(c.kind == GATEWAY and _is_of(c, child) for c in cards)
        group = child.env.get(GROUP_VARIABLE)
        if group is None:
            return child.age_s() > _ALIVE_IS_WELL_S
        return bool(await self._client.exists(_keys(child).group(group)))

    def models(self, *states: ChildState) -> set[str]:
        """Returns the models that have a worker in one of these states."""
        return {
            model_of_worker(child.spec)
            for child in self._children
            if is_worker(child) and child.state in states
        }

    @property
    def awaited(self) -> set[str]:
        """Models that nobody serves yet and somebody still may."""
        coming = self.models(ChildState.STARTING, ChildState.WAITING)
        # The others are not kept from their users by one that dies again and again.
        given_up = set(self.failing) if self.served else set()
        return coming - self.served - given_up

    @property
    def failing(self) -> dict[str, Child]:
        """Models of which every worker dies, never having served -> one of those."""
        workers: dict[str, list[Child]] = {}
        for child in filter(is_worker, self._children):
            workers.setdefault(model_of_worker(child.spec), []).append(child)
        return {
            model: some[0]
            for model, some in workers.items()
            if model not in self.served and all(map(_dies, some))
        }

    def _gateway_comes(self) -> bool:
        """Whether a gateway starts for the first time and does not answer yet."""
        return any(
            child.spec.name == GATEWAY
            and child.state is ChildState.STARTING
            and not child.restarts
            for child in self._children
        )

    def _settled(self) -> set[str]:
        """Models with a worker: of the settings, where one of those starts at first.

        A worker of a version without a share may be there before it.
        """
        own = [c for c in self._children if is_worker(c) and c.spec.essential]
        served = {model_of_worker(c.spec) for c in own if c.state is ChildState.RUNNING}
        coming = {
            model_of_worker(c.spec)
            for c in own
            if c.state is ChildState.STARTING and not c.restarts
        }
        return served | (self.models(ChildState.RUNNING) - coming)

    def _note_served(self) -> None:
        for model in sorted(self._settled() - self.served):
            self.served.add(model)
            self._on_served(model)
        running = [c for c in self._children if c.state is ChildState.RUNNING]
        if any(child.spec.name == "scheduler" for child in running):
            has_workers = any(map(is_worker, self._children))
            self.serves = self.serves or bool(self.served) or not has_workers


def is_worker(child: Child) -> bool:
    """Whether this child serves a model."""
    return child.spec.name.startswith("worker")


def _dies(child: Child) -> bool:
    """Whether it has failed for good, or died as often as is no accident."""
    died = child.restarts + (child.state is ChildState.WAITING)
    return child.state is ChildState.FAILED or died >= _DEATHS


def _is_of(card: ProcessCard, child: Child) -> bool:
    return (card.host, card.pid) == (socket.gethostname(), child.pid)


def _keys(worker: Child) -> Keys:
    return Keys(model_of_worker(worker.spec), partition_of_worker(worker.spec))


class Forfeiter:
    """Ends the leases of a worker that is known to be dead, at once.

    Args:
        client: Redis.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client

    async def __call__(self, child: Child, env: Mapping[str, str]) -> None:
        """Forfeits the incarnation that ran with `env`, if it was a worker's."""
        group = env.get(GROUP_VARIABLE)
        if group is None:
            return
        scripts = Scripts(self._client, _keys(child))
        try:
            async with asyncio.timeout(_FORFEIT_TIMEOUT_S):
                # Who was asked to end cannot have been ended by a job.
                num_jobs = await scripts.forfeit(
                    group,
                    process_ended(child.exit_code),
                    counts=not child.is_stopping,
                )
        except (TokenmillError, redis.exceptions.RedisError, OSError) as error:
            # Then the leases end by themselves, some seconds later.
            line(f"warning: leases of {group} not ended: {error}")
        else:
            if num_jobs:
                line(f"{num_jobs} jobs of {group} are redelivered")


async def forget_dead_groups(client: redis.asyncio.Redis) -> int:
    """Ends the leases of all groups in a server that has just been started.

    Nobody can be connected to it yet, so every group in it is of a pool that died.

    Returns:
        How many jobs will be redelivered.
    """
    num_jobs = 0
    async with client.pipeline(transaction=False) as pipe:
        pipe.smembers(SHARDS)
        (shards,) = await pipe.execute()
    for shard in shards:
        keys = Keys.of_shard(shard.decode())
        scripts = Scripts(client, keys)
        for name in await client.zrange(keys.groups, 0, -1):
            # It counts: a job that exhausts a host's memory takes the supervisor along.
            num_jobs += await scripts.forfeit(
                name.decode(), "its whole pool ended without being stopped"
            )
    return num_jobs
