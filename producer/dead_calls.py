"""The dead letters as methods of both clients."""

from typing import TYPE_CHECKING

from .dead import DeadLetters, Ids
from .dead_letter import DeadLetter, Requeued
from .session import Session
from .submit import WhenFull

if TYPE_CHECKING:
    from .client import Client
    from .sync import LoopThread


class DeadCalls:
    """What `Client` can do with jobs that failed for good."""

    @property
    def _session(self) -> Session:
        raise NotImplementedError

    async def dead_letters(self, ids: Ids = None) -> list[DeadLetter]:
        """Returns dead letters, newest first; see `DeadLetters.find`."""
        return await DeadLetters(self._session).find(ids)

    async def requeue(
        self, ids: Ids, *, when_full: WhenFull = "raise", wait_s: float | None = None
    ) -> list[Requeued]:
        """Runs dead jobs again, as new jobs; see `DeadLetters.requeue`."""
        letters = DeadLetters(self._session)
        return await letters.requeue(ids, when_full=when_full, wait_s=wait_s)

    async def purge(self, ids: Ids, *, older_than_ms: int | None = None) -> int:
        """Removes dead letters; see `DeadLetters.purge`."""
        return await DeadLetters(self._session).purge(ids, older_than_ms=older_than_ms)


class SyncDeadCalls:
    """The same for `SyncClient`."""

    _client: "Client"

    @property
    def _thread(self) -> "LoopThread":
        raise NotImplementedError

    def dead_letters(self, ids: Ids = None) -> list[DeadLetter]:
        """Returns dead letters, newest first; see `DeadLetters.find`."""
        return self._thread.run(self._client.dead_letters(ids))

    def requeue(
        self, ids: Ids, *, when_full: WhenFull = "raise", wait_s: float | None = None
    ) -> list[Requeued]:
        """Runs dead jobs again, as new jobs; see `DeadLetters.requeue`."""
        return self._thread.run(
            self._client.requeue(ids, when_full=when_full, wait_s=wait_s)
        )

    def purge(self, ids: Ids, *, older_than_ms: int | None = None) -> int:
        """Removes dead letters; see `DeadLetters.purge`."""
        return self._thread.run(self._client.purge(ids, older_than_ms=older_than_ms))
