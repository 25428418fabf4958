"""Jobs with an adapter, between their start and the engine: found, loaded, handed on.

The name is looked up at every start, the files are read off the event loop and off the
engine's thread. Whatever is wrong ends that one job.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import redis.asyncio
import structlog

from ..shared.adapters import AdapterCard, key_of
from ..shared.adapters_registry import AdapterRegistry, Standing
from ..shared.errors import (
    AdapterUnavailable,
    ModelLoadError,
    TokenmillError,
    UnknownAdapter,
)
from ..shared.messages import AdapterRef
from ..shared.outage import REDIS_ERRORS, Backoff, Outage
from ..shared.tasks import end_tasks
from .adapters_loader import AdapterLoader, Held, off_loop, too_slow
from .ending import Ending, Way
from .engine.request import EngineRequest
from .engine_thread import job_error
from .jobs import JobTable, RunningJob

LOOK_AGAIN_S: Final = 0.25
"""While all memory is in use, a wait for a job to leave is cut off after this long:
some other part may have let an adapter go."""
PATIENCE_S: Final = 5.0
"""A job that has found no room for so long goes before those that came after it: their
adapters, in use by one after the other, would else never leave the memory."""


class AdapterStart:
    """Brings the adapters of started jobs into memory.

    Args:
        client: Redis, for the registry.
        model: Public name of the worker's model.
        loader: Holds adapters.
        table: The jobs in hand.
        outage: Shared state of the connection.
        take: Called with a job that the engine is to run.
        end: Called with a job that ends at once.
        limit_s: Longest that the files of one may take to come.
    """

    def __init__(
        self,
        *,
        client: "redis.asyncio.Redis",
        model: str,
        loader: AdapterLoader,
        table: JobTable,
        outage: Outage,
        take: Callable[[Sequence[tuple[RunningJob, EngineRequest]]], None],
        end: Callable[[Ending], None],
        limit_s: float,
    ) -> None:
        self._registry = AdapterRegistry(client, model)
        self._loader = loader
        self._table = table
        self._outage = outage
        self._take = take
        self._end = end
        self._limit_s = limit_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = asyncio.Event()
        """Set when a job lets its adapter go."""
        self._short: dict[RunningJob, float] = {}
        """Jobs that have found no room, and since when; the first of them first."""
        self._log = structlog.get_logger()

    def bring(self, job: RunningJob, request: EngineRequest) -> None:
        """Sees to it that a job reaches the engine with its adapter, or ends.

        Args:
            job: In the table; its request names an adapter.
            request: What the engine is to get.
        """
        task = asyncio.create_task(self._bring(job, request), name="adapter")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stops bringing; the jobs are for others to end or hand back."""
        await end_tasks(*self._tasks)

    async def _bring(self, job: RunningJob, request: EngineRequest) -> None:
        ref = job.request.adapter
        assert ref is not None
        try:
            card = await self._found(job, ref)
            held = await self._loaded(job, ref, card)
        except TokenmillError as error:
            self._fail(job, error)
        except Exception as error:  # noqa: BLE001 - any fault is this job's alone
            self._log.exception("adapter_not_brought", job=job.id, adapter=ref.name)
            self._fail(job, error)
        else:
            self._hand_on(job, request, held)

    def _hand_on(
        self, job: RunningJob, request: EngineRequest, held: Held | None
    ) -> None:
        if held is None:
            return
        if not self._goes_on(job):
            held.release()
            return
        job.on_left = partial(self._let_go, held)
        self._take([(job, request)])

    def _let_go(self, held: Held) -> None:
        held.release()
        self._left.set()

    def _goes_on(self, job: RunningJob) -> bool:
        """False once it was cancelled, has expired, or another worker owns it."""
        return self._table.holds(job) and not job.closing

    def _fail(self, job: RunningJob, error: Exception) -> None:
        if not self._goes_on(job):
            return
        self._log.warning("adapter_refused", job=job.id, error=str(error))
        self._end(Ending(job, Way.FAILED, error=job_error(error)))

    # --- found -----------------------------------------------------------------------
    async def _found(self, job: RunningJob, ref: AdapterRef) -> AdapterCard:
        """The card of exactly the adapter that a job names.

        Raises:
            UnknownAdapter: There is none that this job may use.
        """
        standing = await self._standing(ref)
        tenant = job.started.tenant
        for card in (standing.current, standing.retired):
            if card is None or card.digest != ref.digest or not card.is_for(tenant):
                continue
            # One that was removed serves what had begun with it, and nothing else.
            if card.retired != "removed" or job.started.first_ms is not None:
                return card
        raise _not_there(self._registry.model, ref, standing, tenant)

    async def _standing(self, ref: AdapterRef) -> Standing:
        backoff = Backoff()
        while True:
            try:
                return await self._registry.standing(ref)
            except REDIS_ERRORS as error:
                self._outage.failed("adapters", error)
                await backoff.wait()

    # --- loaded ----------------------------------------------------------------------
    async def _loaded(
        self, job: RunningJob, ref: AdapterRef, card: AdapterCard
    ) -> Held | None:
        """The adapter in memory; None when the job has left meanwhile.

        Raises:
            AdapterUnavailable: It cannot be had; the message says why.
        """
        load = partial(self._loader.load, key_of(ref), Path(card.path), ref.digest)
        try:
            while self._goes_on(job):
                self._left.clear()
                if not self._gives_way(job):
                    try:
                        return await self._in_time(load)
                    except AdapterUnavailable as full:
                        self._log.debug("adapter_waits", job=job.id, why=str(full))
                        self._short.setdefault(job, time.monotonic())
                await self._until_one_left()
        except ModelLoadError as error:
            raise AdapterUnavailable(
                f"adapter '{ref.name}' cannot be loaded: {error}"
            ) from error
        finally:
            if self._short.pop(job, None) is not None:
                self._left.set()
        return None

    def _gives_way(self, job: RunningJob) -> bool:
        """Whether another job has waited for room for long enough to go first."""
        first = next(iter(self._short), job)
        return first is not job and self._short[first] < time.monotonic() - PATIENCE_S

    async def _in_time(self, load: Callable[[], Held]) -> Held:
        loading = asyncio.ensure_future(off_loop(load))
        try:
            done, _ = await asyncio.wait([loading], timeout=self._limit_s)
        except asyncio.CancelledError:
            loading.add_done_callback(_release_late)
            raise
        if done:
            return loading.result()
        # Nobody waits for it any more: what it brings is let go at once.
        loading.add_done_callback(_release_late)
        raise too_slow(self._limit_s)

    async def _until_one_left(self) -> None:
        try:
            async with asyncio.timeout(LOOK_AGAIN_S):
                await self._left.wait()
        except TimeoutError:
            return


def _release_late(loading: "asyncio.Future[Held]") -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().release()


def _not_there(
    model: str, ref: AdapterRef, standing: Standing, tenant: str
) -> TokenmillError:
    """Says why a job cannot have what it names."""
    current, retired = (
        None if card is None or not card.is_for(tenant) else card
        for card in (standing.current, standing.retired)
    )
    if current is not None:
        return AdapterUnavailable(
            f"adapter '{ref.name}' of the model '{model}' has other files by now, and "
            f"those with the digest {ref.digest[:12]} are not known any more; submit "
            "the job again"
        )
    if retired is not None:
        return AdapterUnavailable(
            f"adapter '{ref.name}' of the model '{model}' was removed before the job "
            "began; submit it again with another"
        )
    return UnknownAdapter(
        "adapter",
        f"'{ref.name}' is no adapter of the model '{model}' that the tenant "
        f"'{tenant}' may use; register it with `tokenmill lora add` and submit the job "
        "again, or name another",
    )
