"""What all bulk tasks of one process share: settings, model cards, tokenizers."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar, cast

import msgspec
import redis.asyncio
import structlog

from ...shared.adapters_resolve import AdapterResolver
from ...shared.bulk.messages import Document
from ...shared.bulk.writes import RunWrites
from ...shared.clock import redis_ms
from ...shared.config import Config
from ...shared.errors import ModelLoadError, ProtocolError, StorageUnavailable
from ...shared.keys import POOL, Keys, tokenizer_key
from ...shared.messages import ModelCard, PoolCard
from ...shared.pool_card import pool_card
from ...shared.redis import translate
from ...shared.script_types import NewJob
from ...shared.scripts import Scripts
from ...shared.storage import Storage
from ...shared.tokens import BYTES, Tokenizer, load_tokenizer
from ..cards import CardReader

CARD_S: Final = 10.0
"""The pool's settings are read again after this long."""
RETRY_LOAD_S: Final = 5.0
"""A tokenizer that could not be loaded is tried again after this long."""
MOST_JOB_MS: Final = 86_400_000
CACHED_CHARACTERS: Final = 32 * 1024 * 1024
"""Of documents that are kept between two looks at them."""
MOST_WORKS: Final = 32
"""Results of the thread that are kept for those who have not come back yet."""
_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class BulkPool:
    """One process's view of the pool, for its bulk tasks.

    Args:
        client: Redis; replies are bytes.
        config: Settings.
    """

    def __init__(self, client: "redis.asyncio.Redis", config: Config) -> None:
        self.client = client
        self.config = config
        self.adapters = AdapterResolver(client)
        self.busy: set[str] = set()
        """Runs that a task of this process is at."""
        self.announced: set[str] = set()
        """Of runs, what was logged already."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bulk")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="bulk-beside")
        self._works: dict[Hashable, asyncio.Future[Any]] = {}
        self._tokenizers: dict[str, Tokenizer] = {BYTES: load_tokenizer(BYTES)}
        self._retry_at: dict[str, float] = {}
        self._cards: dict[str, CardReader] = {}
        self._scripts: dict[str, Scripts] = {}
        self._settings: tuple[float, PoolCard] | None = None
        self._store: tuple[tuple[str, int], Storage] | None = None
        self._documents: OrderedDict[tuple[str, int, int], Document] = OrderedDict()

    def close(self) -> None:
        """Ends the threads after their present work."""
        for thread in (self._thread, self._beside):
            thread.shutdown(wait=False, cancel_futures=True)

    @property
    def keep_ms(self) -> int:
        """How long runs stay after they were last touched."""
        return round(self.config.bulk.keep_s * 1000)

    @property
    def job_keep_ms(self) -> int:
        """How long the jobs of runs stay after their end, until it is recorded.

        At least a day where runs and dead letters are kept long enough, so that a
        janitor may be down that long and no job is run twice; less than dead letters.
        """
        dead_ms = round(self.config.retention.dead_s * 1000)
        return max(1000, min(self.keep_ms, MOST_JOB_MS, dead_ms // 2))

    def writes(self, run: str) -> RunWrites:
        """Returns the writes of a run."""
        return RunWrites(self.client, run, keep_ms=self.keep_ms)

    def scripts(self, keys: Keys) -> Scripts:
        """Returns the scripts of a shard."""
        return self._scripts.setdefault(keys.shard, Scripts(self.client, keys))

    async def in_thread(
        self, what: Hashable, work: Callable[[], _T], wait_s: float | None = None
    ) -> _T | None:
        """Runs something heavy off the event loop; tokenizers meet one thread only.

        The thread serves all runs, and a large document takes it for long. So nobody
        has to wait it out: the work goes on, and who asks again is given its result.

        Args:
            what: Names the work.
            work: Does it.
            wait_s: Longest wait, the work of others before it included; None for any.

        Returns:
            What `work` gives, once; None while it is not done.
        """
        future = self._works.get(what)
        if future is None:
            self._forget_works()
            loop = asyncio.get_running_loop()
            future = self._works[what] = loop.run_in_executor(self._thread, work)
        done, _ = await asyncio.wait([future], timeout=wait_s)
        if not done:
            return None
        self._works.pop(what, None)
        return cast("_T", future.result())

    def _forget_works(self) -> None:
        """Lets go of results that nobody has come for: their runs are gone."""
        done = [what for what, future in self._works.items() if future.done()]
        for what in done[: max(0, len(done) - MOST_WORKS)]:
            future = self._works.pop(what)
            if not future.cancelled() and (error := future.exception()) is not None:
                _log.warning("bulk_work_failed", error=str(error))

    async def beside(self, work: Callable[[], _T]) -> _T:
        """Runs something off the event loop that is short and has no tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._beside, work)

    async def card(self, model: str) -> ModelCard | None:
        """Returns what workers say of a model; None while none has ever started."""
        reader = self._cards.setdefault(model, CardReader(self.client, model))
        return await reader.current()

    async def settings(self) -> PoolCard:
        """Returns the pool's published settings, or those of this process."""
        now = time.monotonic()
        if self._settings is None or now - self._settings[0] > CARD_S:
            raw = await self.client.get(POOL)
            try:
                found = msgspec.json.decode(raw, type=PoolCard) if raw else None
            except msgspec.DecodeError as error:
                _log.warning("pool_card_unusable", error=str(error))
                found = None
            self._settings = (now, found or pool_card(self.config))
        return self._settings[1]

    async def tokenizer(self, card: ModelCard) -> Tokenizer | None:
        """Returns a model's tokenizer, to be used in the thread alone.

        Returns:
            None while it cannot be had; the cause is logged.
        """
        name = card.tokenizer
        if name not in self._tokenizers:
            await self._load(card.model, name)
        return self._tokenizers.get(name)

    async def _load(self, model: str, name: str) -> None:
        now = time.monotonic()
        if now < self._retry_at.get(name, 0.0):
            return
        self._retry_at[name] = now + RETRY_LOAD_S
        bundle = await self.client.get(tokenizer_key(name))
        if bundle is None:
            _log.warning("tokenizer_missing", model=model, tokenizer=name)
            return
        try:
            work = partial(load_tokenizer, bundle)
            made = await self.in_thread(("tokenizer", name), work)
        except (ModelLoadError, ProtocolError) as error:
            _log.error("tokenizer_unusable", model=model, error=str(error))
            return
        if made is not None:
            _log.info("tokenizer_loaded", model=model, tokenizer=name)
            self._tokenizers[name] = made

    async def upload(self, jobs: Sequence[NewJob]) -> None:
        """Puts inputs by reference where their jobs will look for them.

        Raises:
            StorageUnavailable: The store does not answer or refuses.
        """
        uploads = [job.upload for job in jobs if job.upload is not None]
        if uploads:
            store = await self._opened()
            await asyncio.gather(*(store.write(*upload) for upload in uploads))

    async def _opened(self) -> Storage:
        card = await self.settings()
        if card.storage_url is None:
            raise StorageUnavailable("the pool has no store for large inputs")
        place = (card.storage_url, card.max_input_bytes)
        if self._store is None or self._store[0] != place:
            made = await Storage.opened(place[0], max_bytes=place[1])
            self._store = (place, made)
        return self._store[1]

    def remember(self, place: tuple[str, int, int], document: Document) -> None:
        """Keeps a document for the next look at it.

        Args:
            place: Run, seq and generation.
            document: Its text.
        """
        self._documents[place] = document
        total = sum(len(one.text) for one in self._documents.values())
        while total > CACHED_CHARACTERS and len(self._documents) > 1:
            total -= len(self._documents.popitem(last=False)[1].text)

    def remembered(self, place: tuple[str, int, int]) -> Document | None:
        """Returns a document that was kept."""
        if place in self._documents:
            self._documents.move_to_end(place)
        return self._documents.get(place)

    async def now_ms(self) -> int:
        """Returns the time of Redis."""
        with translate():
            return await redis_ms(self.client)
