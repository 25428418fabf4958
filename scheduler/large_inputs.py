"""Inputs by reference: fetched from the pool's store beside the other jobs.

A store may be slow or away. Its jobs wait for it here; nobody else does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
import structlog

from ..shared.config import Config
from ..shared.decode import decode_request
from ..shared.errors import (
    InvalidRequest,
    NewerSchema,
    StorageUnavailable,
    TokenmillError,
)
from ..shared.messages import InputRef, ModelCard
from ..shared.outage import Backoff
from ..shared.storage import Storage
from .entries import Entry
from .tokenizing import RawJob

FETCHES: Final = 4
"""Inputs of one class in memory at a time."""
MOST_WAITING: Final = 2_048
"""Jobs in memory whose input is not here; then reading their class waits."""
LONGEST_WAIT_S: Final = 15.0
"""Between two looks at a store that is away."""
_MARK: Final = b'"text_ref"'
"""In every payload that names its input, and in few others."""
_log = structlog.get_logger(__name__)


def ref_in(raw: RawJob) -> InputRef | None:
    """Returns the input that a job names, when that is still to be fetched.

    A payload that cannot be read names none; what is wrong with it is said elsewhere.
    """
    if raw.token_ids or _MARK not in raw.payload:
        return None
    try:
        request = decode_request(raw.payload)
    except TokenmillError:
        return None  # the same error is raised again where the job is prepared
    is_alone = request.text is None and request.messages is None
    return request.text_ref if is_alone else None


class LargeInputs:
    """Fetches inputs of one class, a few at a time.

    Args:
        config: Where the store is.
        take_in: Called with a job and its input, once that is here.
        refuse: Called with a job whose input cannot be had.
    """

    def __init__(
        self,
        config: Config,
        take_in: Callable[[Entry, RawJob, ModelCard], Awaitable[None]],
        refuse: Callable[[Entry, TokenmillError], Awaitable[None]],
    ) -> None:
        self._url = config.storage.url
        self._max_bytes = config.storage.max_input_bytes
        self._take_in = take_in
        self._refuse = refuse
        self._slots = asyncio.Semaphore(FETCHES)
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._store: Storage | None = None
        self._away = False

    async def start(
        self, entry: Entry, raw: RawJob, ref: InputRef, card: ModelCard
    ) -> None:
        """Begins to fetch a job's input; returns at once unless very many wait.

        Args:
            entry: The job.
            raw: What Redis has of it.
            ref: The input it names.
            card: Of the job's model.
        """
        while len(self._tasks) >= MOST_WAITING:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self.check()
        self._tasks.add(asyncio.create_task(self._fetch(entry, raw, ref, card)))

    def check(self) -> None:
        """Raises what a fetch has raised: nothing that concerns its job alone."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()

    async def close(self) -> None:
        """Gives up what is being fetched; the jobs still wait in Redis."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._store is not None:
            self._store.close()
            self._store = None

    async def _fetch(
        self, entry: Entry, raw: RawJob, ref: InputRef, card: ModelCard
    ) -> None:
        async with self._slots:
            try:
                content = await self._read(ref, entry.tenant)
            except InvalidRequest as error:
                await self._refuse(entry, error)
                return
            fetched = msgspec.structs.replace(raw, blob=content)
            await self._take_in(entry, fetched, card)

    async def _read(self, ref: InputRef, tenant: str) -> bytes:
        backoff = Backoff(first_s=0.5, longest_s=LONGEST_WAIT_S)
        while True:
            try:
                store = await self._opened()
                content = await store.read(ref, tenant)
            except StorageUnavailable as error:
                if not self._away:
                    self._away = True
                    _log.error("storage_unavailable", error=str(error))
                await backoff.wait()
                continue
            if self._away:
                self._away = False
                _log.warning("storage_back")
            return content

    async def _opened(self) -> Storage:
        async with self._opening:
            return await self._open()

    async def _open(self) -> Storage:
        if self._store is None:
            if self._url is None:
                raise StorageUnavailable(
                    "jobs name inputs in a store and this scheduler has none; set "
                    "storage.url as for the scheduler that published it"
                )
            self._store = await Storage.opened(self._url, max_bytes=self._max_bytes)
        return self._store


class TooNew:
    """Jobs left waiting for a scheduler that reads their schema version.

    Args:
        shard: For the log.
    """

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._told: set[int] = set()

    def leave(self, job_id: str, error: NewerSchema) -> None:
        """Says once for each version that such jobs wait, and names the first."""
        if error.version not in self._told:
            self._told.add(error.version)
            _log.warning(
                "schema_too_new", shard=self._shard, job=job_id, error=str(error)
            )


def split(
    raw: Sequence[RawJob], entries: Sequence[Entry]
) -> tuple[list[RawJob], list[Entry], list[tuple[Entry, RawJob, InputRef]]]:
    """Parts jobs whose input is in Redis from those whose input is to be fetched.

    Returns:
        Payloads and entries of the former, in order; the latter.
    """
    here: list[RawJob] = []
    known: list[Entry] = []
    away: list[tuple[Entry, RawJob, InputRef]] = []
    for job, entry in zip(raw, entries, strict=True):
        ref = ref_in(job)
        if ref is None:
            here.append(job)
            known.append(entry)
        else:
            away.append((entry, job, ref))
    return here, known, away
