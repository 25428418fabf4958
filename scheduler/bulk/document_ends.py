"""How documents settle: with a summary, key sentences, or an error that names where."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

import structlog

from ...shared.bulk.job_ids import Place, place_of
from ...shared.bulk.messages import Outcome, RunSpec, Settled, Summary
from ...shared.bulk.writes import NewOutcome, RunWrites
from ...shared.errors import TokenmillError
from ...shared.keys import JobId
from ...shared.messages import JobError, Timings, Usage
from ..outage import REDIS_ERRORS
from .document_state import DocumentState
from .faults import as_job_error
from .items import Standing
from .plans import Level, Part, tree_of
from .pool import BulkPool
from .requests import settled_as
from .results import Ended
from .words import limit_words, num_words

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class DocumentEnds:
    """Settles the documents of one run.

    Args:
        pool: The process's view of the pool.
        writes: Of the run.
        spec: The run's.
        state: Of its documents.
    """

    def __init__(
        self,
        pool: BulkPool,
        writes: RunWrites,
        spec: RunSpec,
        state: DocumentState,
    ) -> None:
        self._pool = pool
        self._writes = writes
        self._spec = spec
        self._state = state

    async def succeed(self, standing: Standing, last_level: int) -> None:
        """The last level is complete: its one part is the summary."""
        levels = [
            await self._state.level(standing, number)
            for number in range(last_level + 1)
        ]
        parts = [await self._state.parts(standing, level) for level in levels]
        every = [part for made in parts for part in made]
        text = limit_words(parts[-1][0].text, self._spec.max_words)
        first = levels[0].windows
        summary = Summary(
            text=text,
            words=num_words(text),
            windows=len(first),
            levels=len(levels),
            mode=self._spec.mode,
            source_tokens=sum(window[2] for window in first),
            fell_back=tuple(
                f"{level.level}:{index}: {part.fell_back}"
                for level, made in zip(levels, parts, strict=True)
                for index, part in enumerate(made)
                if part.fell_back
            ),
            tree=tree_of(levels, parts) if self._spec.keep_tree else None,
        )
        await self._settle(standing, "succeeded", summary=summary, parts=every)

    async def extract(self, standing: Standing, text: str) -> None:
        """Settles a document by its key sentences."""
        summary = Summary(
            text=text, words=num_words(text), windows=1, levels=1, mode="extractive"
        )
        await self._settle(standing, "succeeded", summary=summary)

    async def alone(
        self, standing: Standing, work: Awaitable[_T], job_ids: Iterable[str] = ()
    ) -> _T | None:
        """Does something for one document; what goes wrong with it settles it alone.

        Args:
            standing: The item.
            work: What is done.
            job_ids: Its jobs that have just ended.

        Returns:
            What `work` gives; None where the document was refused instead.
        """
        try:
            return await work
        except REDIS_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 - any fault is this document's alone
            run = self._writes.keys.run
            why = as_job_error(error, run=run, seq=standing.seq)
            await self.refuse(standing, why, job_ids)
            return None

    async def refuse(
        self, standing: Standing, error: JobError, job_ids: Iterable[str] = ()
    ) -> None:
        """Settles a document that cannot be summarized, or not any further.

        Args:
            standing: The item.
            error: Why.
            job_ids: Its jobs that have just ended.
        """
        others = await self._others(standing, *job_ids)
        ids = (*job_ids, *others)
        await self._settle(standing, "failed", error=error, open_ids=ids)
        await cancel_jobs(self._pool, others)

    async def _others(self, standing: Standing, *but: str) -> list[str]:
        """Open jobs of a document."""
        return [
            job_id
            for job_id in await self._writes.opened()
            if _is_of(job_id, standing) and job_id not in but
        ]

    async def fail(
        self,
        standing: Standing,
        place: Place,
        ended: Ended,
        error: JobError | None = None,
    ) -> None:
        """One part failed: so does the document, and its other jobs are cancelled.

        Args:
            standing: The item.
            place: Of the part.
            ended: Its job.
            error: Why, where the job was never enqueued.
        """
        cause = error or ended.error or JobError("internal_error", "no cause is known")
        level = await self._state.level(standing, place.level)
        where = _where(level, place)
        named = JobError(cause.code, f"{where}: {cause.message}", cause.field)
        state = "failed" if error is not None else settled_as(ended)
        others = await self._others(standing, ended.job_id)
        ids = (ended.job_id, *others)
        await self._settle(standing, state, error=named, open_ids=ids)
        await cancel_jobs(self._pool, others)

    async def _settle(
        self,
        standing: Standing,
        state: Settled,
        *,
        summary: Summary | None = None,
        error: JobError | None = None,
        parts: list[Part] | None = None,
        open_ids: tuple[str, ...] = (),
    ) -> None:
        made = parts or []
        total_ms = float(await self._pool.now_ms() - standing.fed_ms)
        outcome = Outcome(
            seq=standing.seq,
            generation=standing.generation,
            custom_id=await self._state.custom_id(standing),
            state=state,
            summary=summary,
            error=error,
            usage=Usage(
                prompt_tokens=sum(part.prompt_tokens for part in made),
                completion_tokens=sum(part.completion_tokens for part in made),
            ),
            timings=Timings(total_ms=total_ms),
            job_ids=tuple(part.job_id for part in made if part.job_id) or open_ids[:1],
        )
        # Its jobs and tokens were counted as they were recorded.
        new = NewOutcome(outcome=outcome, open_ids=open_ids, count_usage=False)
        await self._writes.settle([new])


def _where(level: Level, place: Place) -> str:
    first, end, _ = level.windows[place.index]
    number, of = place.index + 1, len(level.windows)
    if level.level == 0:
        return f"window {number} of {of} (characters {first} to {end})"
    return f"summary {number} of {of} of level {level.level}"


def _is_of(job_id: str, standing: Standing) -> bool:
    place = place_of(job_id)
    return (
        place is not None
        and place.seq == standing.seq
        and place.generation == standing.generation
    )


async def cancel_jobs(pool: BulkPool, job_ids: list[str]) -> None:
    """Asks for the end of jobs that no item waits for any more."""

    async def cancel(job_id: str) -> None:
        try:
            await pool.scripts(JobId.parse(job_id).keys).cancel(job_id)
        except TokenmillError as error:
            # It runs for nothing and ends by itself.
            _log.warning("bulk_job_not_cancelled", job=job_id, error=str(error))

    for first in range(0, len(job_ids), 32):
        await asyncio.gather(*map(cancel, job_ids[first : first + 32]))
