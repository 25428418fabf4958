"""A worker's part in adapters: for its jobs, and for those about to register one."""

from collections.abc import Callable, Sequence

import redis.asyncio

from ..shared.messages import ModelCard
from ..shared.outage import Outage
from .adapters_check import AdapterChecks
from .adapters_loader import AdapterLoader, AdapterStats
from .adapters_start import AdapterStart
from .ending import Ending
from .engine.request import EngineRequest
from .jobs import JobTable, RunningJob


class Adapters:
    """Joins what brings adapters to jobs with what checks new ones.

    Args:
        client: Redis.
        loader: Holds adapters in memory.
        card: Of the worker's model.
        table: The jobs in hand.
        outage: Shared state of the connection.
        limit_s: Longest that the files of an adapter may take to come.
        watch: Called with a job whose deadline is to be watched while it waits.
        take: Called with jobs that the engine is to run.
        end: Called with a job that ends at once.
    """

    def __init__(
        self,
        *,
        client: "redis.asyncio.Redis",
        loader: AdapterLoader,
        card: ModelCard,
        table: JobTable,
        outage: Outage,
        limit_s: float,
        watch: Callable[[RunningJob], None],
        take: Callable[[Sequence[tuple[RunningJob, EngineRequest]]], None],
        end: Callable[[Ending], None],
    ) -> None:
        self._loader = loader
        self._watch = watch
        self._start = AdapterStart(
            client=client,
            model=card.model,
            loader=loader,
            table=table,
            outage=outage,
            take=take,
            end=end,
            limit_s=limit_s,
        )
        self._checks = AdapterChecks(
            client=client,
            loader=loader,
            base=card.weights_version,
            limit_s=limit_s,
            outage=outage,
        )

    def bring(self, job: RunningJob, request: EngineRequest) -> None:
        """Sees to it that a job reaches the engine with its adapter, or ends."""
        self._watch(job)
        self._start.bring(job, request)

    def check(self, check_id: str) -> None:
        """Begins a check that somebody waits for."""
        self._checks.ask(check_id)

    def stats(self) -> AdapterStats:
        """Returns what is in memory, and what has been."""
        return self._loader.stats()

    async def close(self) -> None:
        """Ends what is under way; the jobs are for others to end or hand back."""
        await self._start.close()
        await self._checks.close()
