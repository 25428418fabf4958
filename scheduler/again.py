"""Jobs to be encoded anew, or later: versions of a model may have other tokenizers."""

import asyncio

import msgspec
import redis.asyncio

from ..shared.keys import Keys
from ..shared.messages import JobClass
from .admitting import entry_of
from .cards import CardReader
from .entries import Entry
from .large_inputs import still_waiting
from .tokenizing import TokenizerThread
from .waiting import Ready, WaitingRoom


class _Kept(msgspec.Struct, frozen=True):
    entry: Entry
    tokenizer: str
    """It waits until this is loaded; empty: for nothing."""


class Again:
    """Finds jobs of one class that their version would not understand as they are.

    A group is given no job that was encoded for another tokenizer; here such jobs are
    taken out of the waiting room, to be taken in once more.

    Args:
        client: Redis.
        keys: The shard's names.
        room: Where ready jobs wait.
        job_class: Which of them.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        keys: Keys,
        room: WaitingRoom,
        job_class: JobClass,
    ) -> None:
        self._client = client
        self._keys = keys
        self._room = room
        self._job_class = job_class
        self._kept: list[_Kept] = []
        self._seen: tuple[object, object] = (None, None)
        self._loading: asyncio.Task[bool] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, entry: Entry, tokenizer: str) -> None:
        """Takes a job that cannot be encoded before a tokenizer is loaded."""
        self._kept.append(_Kept(entry, tokenizer))

    async def due(self, cards: CardReader, tokenizers: TokenizerThread) -> list[Entry]:
        """Returns the jobs that are to be taken in now.

        Args:
            cards: Of the model and its versions.
            tokenizers: What is loaded.
        """
        self._load(cards, tokenizers)
        seen = (self._room.targets, cards.by_version)
        if any(new is not old for new, old in zip(seen, self._seen, strict=True)):
            self._seen = seen
            if cards.is_mixed:
                self._take_outdated(cards)
        ready = [one for one in self._kept if tokenizers.has(one.tokenizer)]
        if not ready:
            return []
        self._kept = [one for one in self._kept if not tokenizers.has(one.tokenizer)]
        entries = [one.entry for one in ready]
        ids = [entry.job_id for entry in entries]
        waiting = await still_waiting(self._client, self._keys, ids)
        return [entry for entry in entries if entry.job_id in waiting]

    def close(self) -> None:
        """Loads nothing any more."""
        if self._loading is not None:
            self._loading.cancel()

    def _load(self, cards: CardReader, tokenizers: TokenizerThread) -> None:
        """Loads what versions encode with. It takes a while: only their jobs wait."""
        if self._loading is not None and self._loading.done():
            self._loading.result()
            self._loading = None
        for own in cards.by_version.values():
            if self._loading is None and not tokenizers.has(own.tokenizer):
                load = tokenizers.ready(self._client, own)
                self._loading = asyncio.create_task(load)

    def _take_outdated(self, cards: CardReader) -> None:
        for ready in list(self._room):
            wanted = self.tokenizer_for(ready, cards)
            if wanted:
                self._room.take(ready.job.id)
                self._kept.append(_Kept(entry_of(ready), wanted))

    def tokenizer_for(self, ready: Ready, cards: CardReader) -> str:
        """Returns what a job is to be encoded with instead; '' where it is well.

        Args:
            ready: The job.
            cards: Of the model and its versions.
        """
        job = ready.job
        if job.job_class is not self._job_class or not job.tokenizer:
            return ""
        card = cards.by_version.get(job.version)
        if not job.version:
            card = cards.for_route(self._room.targets.version_of(job.id))
        if card is None or card.tokenizer == job.tokenizer:
            return ""
        return card.tokenizer
