"""What the supervisor learns from Redis about its children, and does there for them."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import redis.asyncio
import redis.exceptions

from ..errors import TokenmillError
from ..keys import SHARDS, Keys
from ..losses import process_ended
from ..scripts import Scripts
from .lines import line
from .plan import GROUP_VARIABLE, model_of_worker, partition_of_worker
from .processes import Child, ChildState

_LOOK_EVERY_S: Final = 0.2
_ALIVE_IS_WELL_S: Final = 2.0
"""A child without a sign of its own in Redis is taken to run after this long."""
_FORFEIT_TIMEOUT_S: Final = 5.0


class Watcher:
    """Confirms children that start, until each was seen to do its work.

    Args:
        client: Redis.
        children: All of the pool.
        on_ready: Called once, when the pool serves.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        children: Sequence[Child],
        on_ready: Callable[[], None],
    ) -> None:
        self._client = client
        self._children = children
        self._on_ready = on_ready
        self._started = asyncio.Event()
        self.ready = False
        """Whether a scheduler and, where there are any, a worker have been seen."""

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
            if not self.ready and self._is_ready():
                self.ready = True
                self._on_ready()
            if starting:
                await asyncio.sleep(_LOOK_EVERY_S)
            else:
                await self._started.wait()

    async def _works(self, child: Child) -> bool:
        group = child.env.get(GROUP_VARIABLE)
        if group is None:
            return child.age_s() > _ALIVE_IS_WELL_S
        return bool(await self._client.exists(_keys(child).group(group)))

    def _is_ready(self) -> bool:
        workers = [child for child in self._children if is_worker(child)]
        running = [c for c in self._children if c.state is ChildState.RUNNING]
        return any(child.spec.name == "scheduler" for child in running) and (
            not workers or any(map(is_worker, running))
        )


def is_worker(child: Child) -> bool:
    """Whether this child serves a model."""
    return child.spec.name.startswith("worker")


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
