"""One thread that owns the tokenizers: they never meet two threads at once."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import redis.asyncio
import structlog

from ..shared.collector import settle
from ..shared.errors import ModelLoadError, ProtocolError
from ..shared.keys import tokenizer_key
from ..shared.messages import ModelCard
from ..shared.tokens import BYTES, Tokenizer, load_tokenizer
from .preparing import Later as Later
from .preparing import Outcome as Outcome
from .preparing import Prepared as Prepared
from .preparing import RawJob as RawJob
from .preparing import Versions, prepare
from .preparing import alone as alone
from .preparing import internal as internal

RETRY_LOAD_S: Final = 5.0
"""A tokenizer that could not be loaded is tried again after this long."""
INLINE_BYTES: Final = 4096
"""So little is tokenized in less time than it takes to wake a thread and be woken."""
_NO_CARDS: Final[Mapping[str, ModelCard]] = {}
_log = structlog.get_logger(__name__)
T = TypeVar("T")


class TokenizerThread:
    """Runs `prepare` off the event loop, or on it when that is the shorter way.

    One thread owns the tokenizers; the loop uses them only while the thread is idle.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._loaded: dict[str, Tokenizer] = {BYTES: load_tokenizer(BYTES)}
        self._retry_at: dict[str, float] = {}
        self._in_thread: list[Future[Any]] = []
        """Work of the thread: while any is not done, tokenizers are its own."""

    def has(self, fingerprint: str) -> bool:
        """Whether a tokenizer is loaded."""
        return fingerprint in self._loaded

    async def ready(self, client: "redis.asyncio.Redis", card: ModelCard) -> bool:
        """Makes sure that the model's tokenizer is loaded.

        Returns:
            False while it cannot be had; the cause is logged.
        """
        return await self.load(client, card.model, card.tokenizer)

    async def load(
        self, client: "redis.asyncio.Redis", model: str, fingerprint: str
    ) -> bool:
        """The same for a tokenizer that is known by name, before its model's card."""
        if fingerprint in self._loaded:
            return True
        loop = asyncio.get_running_loop()
        if loop.time() < self._retry_at.get(fingerprint, 0.0):
            return False
        self._retry_at[fingerprint] = loop.time() + RETRY_LOAD_S
        bundle = await client.get(tokenizer_key(fingerprint))
        if bundle is None:
            _log.warning("tokenizer_missing", model=model, tokenizer=fingerprint)
            return False
        try:
            tokenizer = await self._run(partial(load_tokenizer, bundle))
        except (ModelLoadError, ProtocolError) as error:
            _log.error("tokenizer_unusable", model=model, error=str(error))
            return False
        except Exception:  # noqa: BLE001 - a bundle may make a loader raise anything
            _log.exception("tokenizer_unusable", model=model)
            return False
        _log.info("tokenizer_loaded", model=model, tokenizer=fingerprint)
        self._loaded[fingerprint] = tokenizer
        settle()  # now, while no job waits, and not in the midst of many
        return True

    async def prepare(
        self,
        raw: Sequence[RawJob],
        card: ModelCard,
        max_bytes: int,
        cards: Mapping[str, ModelCard] = _NO_CARDS,
    ) -> list[Outcome]:
        """See `prepare`; `ready` was true for this card."""
        own = self._loaded[card.tokenizer]
        versions = Versions(cards, self._loaded)
        work = partial(prepare, raw, own, card, max_bytes, versions)
        size = sum(len(job.payload) + len(job.blob or b"") for job in raw)
        if size <= INLINE_BYTES and all(f.done() for f in self._in_thread):
            return work()
        return await self._run(work)

    async def _run(self, work: Callable[[], T]) -> T:
        # Kept by the work itself: whoever waits for it can be cancelled.
        future = self._executor.submit(work)
        self._in_thread = [f for f in self._in_thread if not f.done()] + [future]
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the thread after its present work."""
        self._executor.shutdown(wait=False, cancel_futures=True)
