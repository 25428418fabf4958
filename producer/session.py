"""What a client and its jobs share: connections, the pool's settings, patience."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..shared.errors import (
    InvalidRequest,
    RedisUnavailable,
    StorageUnavailable,
    TokenmillError,
)
from ..shared.keys import JobId, Keys
from ..shared.messages import AdapterRef, PoolCard, Prompt
from .grouping import Grouping
from .inbox import Watcher
from .pins import Pins
from .pool_view import ModelView, PoolView
from .reading import Command, Reads

if TYPE_CHECKING:
    import redis.asyncio

    from ..shared.adapters_resolve import AdapterResolver
    from ..shared.scripts import Scripts
    from ..shared.storage import Storage

_BACKOFF_S: Final = (0.05, 1.0)
"""First and longest wait between attempts while Redis does not answer."""

T = TypeVar("T")


class Session:
    """One client's connections to one pool.

    Args:
        url: Where Redis is.
        patience_s: How long a blip of Redis is waited out before it is an error.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        # Loaded when a client opens: redis takes most of the time of an import.
        from ..shared.redis import connect, translate
        from .listener import Listener

        self.url = url
        self.patience_s = patience_s
        self._translate = translate
        self.redis: redis.asyncio.Redis = connect(url)
        self.listener = Listener(self.redis)
        self.view = PoolView(self.redis)
        self.grouping = Grouping(self)
        self._reads = Reads(self.redis)
        self._scripts: dict[str, Scripts] = {}
        self._stores: dict[tuple[str, int], Storage] = {}
        self._adapters: AdapterResolver | None = None
        self._pins = Pins(self.redis)
        self._closed = False
        self._tasks: set[asyncio.Task[object]] = set()

    def scripts(self, keys: Keys) -> "Scripts":
        """Returns the scripts of a shard."""
        scripts = self._scripts.get(keys.shard)
        if scripts is None:
            from ..shared.scripts import Scripts

            scripts = self._scripts[keys.shard] = Scripts(self.redis, keys)
        return scripts

    def scripts_of(self, job_id: JobId) -> "Scripts":
        """Returns the scripts of the shard that holds a job."""
        return self.scripts(job_id.keys)

    async def adapter(self, prompt: Prompt) -> AdapterRef | None:
        """Returns what the job of a prompt carries of its adapter, if it names one.

        Raises:
            UnknownAdapter: The model has no such adapter, or not for this tenant.
        """
        if prompt.adapter is None:
            return None
        if self._adapters is None:
            from ..shared.adapters_resolve import AdapterResolver

            self._adapters = AdapterResolver(self.redis)
        names = self._adapters
        return await self.patiently(lambda: names.ref(prompt))

    async def require_version(self, prompt: Prompt, view: ModelView) -> None:
        """Checks that the version that a prompt is for, if it names one, takes jobs.

        Raises:
            InvalidRequest: The model has none of that name, or it drains.
        """
        if prompt.version is None:
            return
        model, version, pins = prompt.model, prompt.version, self._pins
        partitions = view.pool.partitions
        await self.patiently(lambda: pins.require(model, version, partitions))
        if version in view.route.draining:
            raise InvalidRequest(
                "version",
                f"{version} of the model '{model}' drains and takes no new jobs; name "
                "another version, or none: then one that serves the model gets the "
                f"job. `tokenmill models load {model} {version}` takes it back",
            )

    async def store(self, pool: PoolCard) -> "Storage":
        """Returns the pool's store of large inputs.

        Raises:
            StorageUnavailable: It has none, or its package is not installed here.
        """
        if pool.storage_url is None:
            raise StorageUnavailable(
                "the pool has no store for large inputs; set storage.url for its "
                "scheduler"
            )
        place = (pool.storage_url, pool.max_input_bytes)
        store = self._stores.get(place)
        if store is None:
            from ..shared.storage import Storage

            store = await Storage.opened(place[0], max_bytes=place[1])
            self._stores[place] = store
        return store

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Awaits `call()`, again and again while Redis does not answer.

        Only for calls that may be repeated: reads, and scripts that know a repeat.

        Args:
            call: Makes a new awaitable for each attempt.

        Raises:
            RedisUnavailable: Redis did not answer for `patience_s`.
            RedisUnsuitable: It answered that it cannot be used.
        """
        give_up = time.monotonic() + self.patience_s
        wait_s, longest_s = _BACKOFF_S
        while True:
            self._require_open()
            try:
                with self._translate():
                    return await call()
            except RedisUnavailable:
                self._require_open()
                if time.monotonic() + wait_s > give_up:
                    raise
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311
            wait_s = min(2 * wait_s, longest_s)

    def _require_open(self) -> None:
        if self._closed:
            raise TokenmillError("the client was closed during the call")

    async def subscribe(self, channels: Sequence[bytes], watcher: Watcher) -> None:
        """Subscribes a watcher and waits for the acknowledgement."""
        await self.patiently(lambda: self.listener.subscribe(channels, watcher))

    async def ping(self) -> None:
        """Makes sure that Redis can be used, without patience: a wrong URL is told now.

        Raises:
            RedisUnavailable: It does not answer.
            RedisUnsuitable: It is too old, a replica, or refuses us.
        """
        from ..shared.server_check import require_usable

        await require_usable(self.redis)

    async def read(self, *commands: Command) -> list[Any]:
        """Sends read commands in one round trip, patiently; see `reading.read`."""
        return await self.patiently(lambda: self._reads.all(*commands))

    async def read_each(self, *commands: Command) -> list[Any]:
        """The same, with errors in the places of replies; see `reading.read_each`."""
        return await self.patiently(lambda: self._reads.each(*commands))

    def start(self, work: Coroutine[object, object, object]) -> None:
        """Runs something in the background, to its end or to `close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends background work, then all connections; calls that wait fail."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._closed = True
        await self.grouping.close()
        await self._reads.close()
        await self.listener.close()
        await self.redis.aclose()
        for store in self._stores.values():
            store.close()
