"""Runs of kind `summarize`: windows, a summary of each, and summaries of summaries."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from ...shared.bulk.job_ids import Place, place_of
from ...shared.bulk.messages import Document, RunSpec
from ...shared.bulk.writes import Opening, RunWrites
from ...shared.errors import InvalidRequest
from ...shared.messages import JobClass
from ...shared.new_job import new_job
from ...shared.script_types import NewJob
from .document_ends import DocumentEnds
from .document_parts import DocumentParts
from .document_state import DocumentState
from .extract import key_sentences
from .items import Standing, standings
from .plans import Level, Part, first_level, next_level
from .pool import BulkPool
from .results import Ended
from .sending import Sent, send

TURN_S: Final = 1.0
"""No further document is begun after this long: some take long to divide."""
NO_MODEL_S: Final = 2.0
"""How long a run pauses whose model no worker has ever served."""
WORK_S: Final = 0.5
"""How long a pass waits for the division of a document; it goes on meanwhile."""
BUSY_S: Final = 0.2
"""How long a run then pauses: what has ended is recorded, and other runs go on."""


class Step(NamedTuple):
    """What was done for one document."""

    jobs: int = 0
    """That were opened."""
    pause_s: float | None = None
    """Set when it must wait."""
    is_moved: bool = True
    """False where there was nothing to do for us."""


class Documents:
    """One run of documents.

    Args:
        pool: The process's view of the pool.
        writes: Of the run.
        spec: The run's.
    """

    def __init__(self, pool: BulkPool, writes: RunWrites, spec: RunSpec) -> None:
        self._pool = pool
        self._writes = writes
        self._spec = spec
        self._state = DocumentState(pool, writes)
        self._ends = DocumentEnds(pool, writes, spec, self._state)
        self._parts = DocumentParts(pool, writes, spec, self._state, self._ends)

    async def record(self, ended: Sequence[Ended]) -> int:
        """Writes down partial summaries; see `DocumentParts.record`."""
        return await self._parts.record(ended)

    async def start(self, seqs: Sequence[int], room: int) -> Sent:
        """Plans, opens and sends, document by document, in their order."""
        moved, pause_s = 0, None
        end = time.monotonic() + TURN_S
        for seq in seqs:
            if room <= 0 or pause_s is not None or time.monotonic() > end:
                break
            known = await standings(
                self._pool.client, self._writes.keys, [seq], with_items=False
            )
            standing = known.get(seq)
            if standing is None or not standing.is_going:
                await self._writes.not_ready([seq])
                continue
            work = self._move(standing, room)
            step = await self._ends.alone(standing, work) or Step()
            pause_s = step.pause_s
            room -= step.jobs
            moved += step.is_moved and pause_s is None
        return Sent(pause_s, {}, moved)

    async def _move(self, standing: Standing, room: int) -> Step:
        """Does the next thing for one document."""
        document = await self._state.document(standing)
        if not document.text.strip():
            raise InvalidRequest(
                "text", "the document has no text; expected at least one sentence"
            )
        if self._spec.mode == "extractive":
            return await self._extract(standing, document)
        if standing.cursor:
            number, _, index = standing.cursor.partition(":")
            level = await self._state.level(standing, int(number))
            if int(index) < len(level.windows):
                return await self._open(standing, document, level, int(index), room)
            if not await self._state.is_complete(standing, level):
                # Another janitor opened its jobs after we had read what is ready.
                return Step(is_moved=False)
            parts = await self._state.parts(standing, level)
            if level.is_last:
                await self._ends.succeed(standing, level.level)
                return Step()
            made = await self._plan(standing, document, level, parts)
        else:
            made = await self._plan(standing, document, None, ())
        if not isinstance(made, Level):
            return Step(pause_s=made)
        return await self._open(standing, document, made, 0, room)

    async def _extract(self, standing: Standing, document: Document) -> Step:
        """Settles a document by its key sentences."""
        work = partial(key_sentences, document.text, self._spec.max_words)
        what = self._work(standing, "extract")
        text = await self._pool.in_thread(what, work, WORK_S)
        if text is None:
            return Step(pause_s=BUSY_S)
        await self._ends.extract(standing, text)
        return Step()

    def _work(self, standing: Standing, what: str) -> tuple[str, int, int, str]:
        """Names work of the thread for one document."""
        run = self._writes.keys.run
        return run, standing.seq, standing.generation, what

    async def _plan(
        self,
        standing: Standing,
        document: Document,
        before: Level | None,
        parts: Sequence[Part],
    ) -> Level | float:
        """Divides the text, or the summaries before; else the seconds to pause."""
        card = await self._pool.card(self._spec.base)
        tokenizer = None if card is None else await self._pool.tokenizer(card)
        if card is None or tokenizer is None:
            self._state.tell_once("bulk_waits_for_model", model=self._spec.base)
            return NO_MODEL_S
        if before is None:
            number = 0
            work = partial(
                first_level, self._spec, document.title, document.text, tokenizer, card
            )
        else:
            number = before.level + 1
            texts = [part.text for part in parts]
            work = partial(next_level, before, texts, tokenizer)
        what = self._work(standing, f"level {number}")
        made = await self._pool.in_thread(what, work, WORK_S)
        return BUSY_S if made is None else made

    async def _open(
        self,
        standing: Standing,
        document: Document,
        level: Level,
        first: int,
        room: int,
    ) -> Step:
        """Opens and sends jobs of a level, as many as there is room for."""
        stop = min(len(level.windows), first + room)
        jobs = [
            await self._job(standing, document, level, index)
            for index in range(first, stop)
        ]
        is_new = first == 0
        opening = Opening(
            seq=standing.seq,
            generation=standing.generation,
            cursor=standing.cursor,
            next_cursor=f"{level.level}:{stop}",
            more=stop < len(level.windows),
            ids=tuple(str(job.id) for job in jobs),
            fields=self._state.fields_of(level) if is_new else {},
            windows=len(level.windows) if is_new else 0,
        )
        (opened,) = await self._writes.open([opening])
        if not opened:
            return Step()
        return Step(len(jobs), await self._send(standing, jobs))

    async def _send(self, standing: Standing, jobs: Sequence[NewJob]) -> float | None:
        sent = await send(self._pool, self._writes, jobs)
        for job_id, error in sent.refused.items():
            place = place_of(job_id)
            if place is not None:
                ended = Ended(job_id=job_id, state="failed")
                await self._ends.fail(standing, place, ended, error)
                break
        return sent.retry_after_s

    async def _job(
        self, standing: Standing, document: Document, level: Level, index: int
    ) -> NewJob:
        source = await self._state.source(standing, document, level, index)
        prompt = msgspec.structs.replace(
            level.prompt(self._spec, document.title, source),
            tenant=self._spec.tenant,
            job_class=JobClass.BULK,
            priority=self._spec.priority,
        )
        place = Place(
            self._writes.keys.run,
            standing.seq,
            standing.generation,
            level.level,
            index,
        )
        card = await self._pool.card(self._spec.base)
        adapter = await self._pool.adapters.ref(prompt)
        settings = await self._pool.settings()
        made = new_job(prompt, card, settings, place.unique, adapter)
        return msgspec.structs.replace(made, keep_ms=self._pool.job_keep_ms)

    async def resend(self, job_ids: Sequence[str]) -> Sent:
        """Enqueues open jobs that may not be in the queue."""
        places = {i: p for i in job_ids if (p := place_of(i)) is not None}
        seqs = sorted({place.seq for place in places.values()})
        known = await standings(
            self._pool.client, self._writes.keys, seqs, with_items=False
        )
        pauses: list[float] = []
        strays = [job_id for job_id in job_ids if job_id not in places]
        for job_id, place in places.items():
            standing = known.get(place.seq)
            going = standing is not None and standing.is_going
            if standing is None or not going or standing.generation != place.generation:
                strays.append(job_id)
        await self._writes.forget(strays)
        for seq, standing in known.items():
            mine = [
                place
                for place in places.values()
                if place.seq == seq
                and place.generation == standing.generation
                and standing.is_going
            ]
            if not mine:
                continue
            pause_s = await self._ends.alone(standing, self._again(standing, mine))
            pauses += [] if pause_s is None else [pause_s]
        return Sent(max(pauses, default=None), {})

    async def _again(self, standing: Standing, mine: Sequence[Place]) -> float | None:
        """Sends jobs of one document again, as they were."""
        document = await self._state.document(standing)
        jobs = [
            await self._job(
                standing,
                document,
                await self._state.level(standing, place.level),
                place.index,
            )
            for place in mine
        ]
        return await self._send(standing, jobs)
