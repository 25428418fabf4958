"""Inputs by reference: fetched from the pool's store beside the other jobs.

A store may be slow or away. Its jobs wait for it here; nobody else does.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
import redis.asyncio
import structlog

from ..shared.config import Config
from ..shared.decode import decode_request
from ..shared.errors import (
    InvalidRequest,
    NewerSchema,
    StorageUnavailable,
    TokenmillError,
)
from ..shared.keys import Keys
from ..shared.messages import InputRef, ModelCard
from ..shared.outage import Backoff
from ..shared.storage import Storage
from ..shared.tasks import end_tasks
from .entries import Entry
from .tokenizing import RawJob

FETCHES: Final = 4
"""Inputs of one class in memory at a time."""
SWEEP_JOBS: Final = 512
"""Jobs asked for in one round trip whether they still wait."""
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


async def still_waiting(
    client: "redis.asyncio.Redis", keys: Keys, job_ids: Sequence[str]
) -> set[str]:
    """Returns those of these jobs that have not ended meanwhile.

    Args:
        client: Redis.
        keys: The shard's names.
        job_ids: Jobs that were waiting when their entries were read.
    """
    pipe = client.pipeline(transaction=False)
    for job_id in job_ids:
        pipe.hget(keys.job(job_id), "state")
    states = await pipe.execute(raise_on_error=False)
    return {
        job_id
        for job_id, state in zip(job_ids, states, strict=True)
        if state == b"queued" or isinstance(state, Exception)
    }


class _Wanted(msgspec.Struct, frozen=True):
    entry: Entry
    raw: RawJob
    ref: InputRef
    card: ModelCard


class LargeInputs:
    """Fetches inputs of one class, a few at a time, the tenants in turn.

    Args:
        config: Where the store is.
        take_in: Called with a job and its input, once that is here.
        refuse: Called with a job whose input cannot be had.
        waiting: Returns those of some jobs that still wait in Redis.
        unfetched: Kept here: stream -> its jobs whose input is not here yet.
    """

    def __init__(
        self,
        config: Config,
        take_in: Callable[[Entry, RawJob, ModelCard], Awaitable[None]],
        refuse: Callable[[Entry, TokenmillError], Awaitable[None]],
        waiting: Callable[[Sequence[str]], Awaitable[set[str]]],
        unfetched: Counter[str],
    ) -> None:
        self._url = config.storage.url
        self._max_bytes = config.storage.max_input_bytes
        self._take_in = take_in
        self._refuse = refuse
        self._waiting = waiting
        self._unfetched = unfetched
        self._tenants: OrderedDict[str, deque[_Wanted]] = OrderedDict()
        """Whose turn is next stands first."""
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._store: Storage | None = None
        self._away = False

    def start(self, entry: Entry, raw: RawJob, ref: InputRef, card: ModelCard) -> None:
        """Sees to it that a job's input is fetched; waits for nothing.

        Args:
            entry: The job.
            raw: What Redis has of it.
            ref: The input it names.
            card: Of the job's model.
        """
        wanted = _Wanted(entry, raw, ref, card)
        self._tenants.setdefault(entry.tenant, deque()).append(wanted)
        self._unfetched[entry.stream] += 1
        if len(self._tasks) < FETCHES:
            self._tasks.add(asyncio.create_task(self._work()))

    def check(self) -> None:
        """Raises what a fetch has raised: nothing that concerns its job alone."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()

    async def close(self) -> None:
        """Gives up what is being fetched; the jobs still wait in Redis."""
        await end_tasks(*self._tasks)
        self._tasks.clear()
        self._tenants.clear()
        if self._store is not None:
            self._store.close()
            self._store = None

    async def _work(self) -> None:
        """Fetches until nothing is left to fetch."""
        backoff = Backoff(first_s=0.5, longest_s=LONGEST_WAIT_S)
        while (wanted := self._next()) is not None:
            if not await self._waiting([wanted.entry.job_id]):
                self._forget(wanted)
            elif await self._fetch(wanted):
                backoff.reset()
            else:
                self._tenants.setdefault(wanted.entry.tenant, deque()).append(wanted)
                await backoff.wait()
                await self._drop_ended()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.discard(task)

    def _next(self) -> _Wanted | None:
        """Takes the first job of the tenant whose turn it is."""
        if not self._tenants:
            return None
        tenant, jobs = self._tenants.popitem(last=False)
        wanted = jobs.popleft()
        if jobs:
            self._tenants[tenant] = jobs
        return wanted

    def _forget(self, wanted: _Wanted) -> None:
        stream = wanted.entry.stream
        self._unfetched[stream] -= 1
        if not self._unfetched[stream]:
            del self._unfetched[stream]

    async def _drop_ended(self) -> None:
        """Forgets jobs that were cancelled or expired while the store was away."""
        jobs = [wanted for queue in self._tenants.values() for wanted in queue]
        for first in range(0, len(jobs), SWEEP_JOBS):
            some = jobs[first : first + SWEEP_JOBS]
            waiting = await self._waiting([one.entry.job_id for one in some])
            for one in some:
                queue = self._tenants.get(one.entry.tenant)
                # Another fetch may have taken it, or dropped it, meanwhile.
                if one.entry.job_id in waiting or queue is None or one not in queue:
                    continue
                queue.remove(one)
                self._forget(one)
                if not queue:
                    del self._tenants[one.entry.tenant]

    async def _fetch(self, wanted: _Wanted) -> bool:
        """Fetches one input; False where the store is away."""
        try:
            content = await self._read(wanted.ref, wanted.entry.tenant)
        except InvalidRequest as error:
            self._forget(wanted)
            await self._refuse(wanted.entry, error)
            return True
        except StorageUnavailable as error:
            if not self._away:
                self._away = True
                _log.error("storage_unavailable", error=str(error))
            return False
        if self._away:
            self._away = False
            _log.warning("storage_back")
        fetched = msgspec.structs.replace(wanted.raw, blob=content)
        try:
            await self._take_in(wanted.entry, fetched, wanted.card)
        finally:
            self._forget(wanted)
        return True

    async def _read(self, ref: InputRef, tenant: str) -> bytes:
        store = await self._opened()
        return await store.read(ref, tenant)

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
