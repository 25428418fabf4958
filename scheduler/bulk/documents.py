"""Runs of kind `summarize`: windows, a summary of each, and summaries of summaries."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from ...shared.bulk.job_ids import Place, place_of
from ...shared.bulk.messages import Document, RunSpec
from ...shared.bulk.writes import Opening, RunWrites
from ...shared.errors import InvalidRequest
from ...shared.messages import JobClass
from ...shared.new_job import new_job
from ...shared.script_types import NewJob
from .document_ends import OWN_ERRORS, DocumentEnds, as_recorded
from .document_parts import DocumentParts
from .document_state import DocumentState
from .items import Standing, standings
from .plans import Level, Part, first_level, next_level
from .pool import BulkPool
from .results import Ended
from .sending import Sent, send

TURN_S: Final = 1.0
"""No further document is begun after this long: some take long to divide."""
NO_MODEL_S: Final = 2.0
"""How long a run pauses whose model no worker has ever served."""


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
            try:
                opened, pause_s = await self._move(standing, room)
            except OWN_ERRORS as error:
                await self._ends.refuse(standing, as_recorded(error))
                opened = 0
            room -= opened
            moved += pause_s is None
        return Sent(pause_s, {}, moved)

    async def _move(self, standing: Standing, room: int) -> tuple[int, float | None]:
        """Does the next thing for one document.

        Returns:
            How many jobs were opened, and the seconds to pause where it must wait.
        """
        document = await self._state.document(standing)
        if not document.text.strip():
            raise InvalidRequest(
                "text", "the document has no text; expected at least one sentence"
            )
        if self._spec.mode == "extractive":
            await self._ends.extract(standing, document)
            return 0, None
        if standing.cursor:
            number, _, index = standing.cursor.partition(":")
            level = await self._state.level(standing, int(number))
            if int(index) < len(level.windows):
                return await self._open(standing, document, level, int(index), room)
            parts = await self._state.parts(standing, level)
            if level.is_last:
                await self._ends.succeed(standing, level.level)
                return 0, None
            made = await self._plan(document, level, parts)
        else:
            made = await self._plan(document, None, ())
        if made is None:
            return 0, NO_MODEL_S
        return await self._open(standing, document, made, 0, room)

    async def _plan(
        self,
        document: Document,
        before: Level | None,
        parts: Sequence[Part],
    ) -> Level | None:
        """Divides the text, or the summaries before; None while that cannot be done."""
        card = await self._pool.card(self._spec.model)
        tokenizer = None if card is None else await self._pool.tokenizer(card)
        if card is None or tokenizer is None:
            self._state.tell_once("bulk_waits_for_model", model=self._spec.model)
            return None
        if before is None:
            work = partial(
                first_level, self._spec, document.title, document.text, tokenizer, card
            )
            return await self._pool.in_thread(work)
        texts = [part.text for part in parts]
        return await self._pool.in_thread(partial(next_level, before, texts, tokenizer))

    async def _open(
        self,
        standing: Standing,
        document: Document,
        level: Level,
        first: int,
        room: int,
    ) -> tuple[int, float | None]:
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
        )
        (opened,) = await self._writes.open([opening])
        if not opened:
            return 0, None
        if is_new:
            await self._writes.add_windows(len(level.windows))
        return len(jobs), await self._send(standing, jobs)

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
        card = await self._pool.card(self._spec.model)
        made = new_job(prompt, card, await self._pool.settings(), place.unique)
        return msgspec.structs.replace(made, keep_ms=self._pool.job_keep_ms)

    async def resend(self, job_ids: Sequence[str]) -> Sent:
        """Enqueues open jobs that may not be in the queue."""
        places = {i: p for i in job_ids if (p := place_of(i)) is not None}
        seqs = sorted({place.seq for place in places.values()})
        known = await standings(
            self._pool.client, self._writes.keys, seqs, with_items=False
        )
        pauses: list[float] = []
        for job_id, place in places.items():
            standing = known.get(place.seq)
            going = standing is not None and standing.is_going
            if standing is None or not going or standing.generation != place.generation:
                await self._writes.forget([job_id])
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
            pause_s = await self._send(standing, jobs)
            pauses += [] if pause_s is None else [pause_s]
        return Sent(max(pauses, default=None), {})
