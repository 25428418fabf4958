"""What ended jobs gave their documents: partial summaries, made fit, or a failure."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import msgspec
import structlog

from ...shared.bulk.job_ids import Place, place_of
from ...shared.bulk.messages import Document, RunSpec
from ...shared.bulk.writes import Recording, RunWrites
from ...shared.messages import FinishReason
from .document_ends import DocumentEnds
from .document_state import DocumentState
from .extract import key_sentences
from .items import Standing, standings
from .plans import Level, Part
from .pool import BulkPool
from .results import Ended, let_go
from .words import cut_at_sentence, limit_words, without_repeats

_log = structlog.get_logger(__name__)


class DocumentParts:
    """Records the jobs of one run.

    Args:
        pool: The process's view of the pool.
        writes: Of the run.
        spec: The run's.
        state: Of its documents.
        ends: Settles those that fail.
    """

    def __init__(
        self,
        pool: BulkPool,
        writes: RunWrites,
        spec: RunSpec,
        state: DocumentState,
        ends: DocumentEnds,
    ) -> None:
        self._pool = pool
        self._writes = writes
        self._spec = spec
        self._state = state
        self._ends = ends

    async def record(self, ended: Sequence[Ended]) -> int:
        """Writes down partial summaries; a window that failed fails its document.

        Returns:
            How many jobs were of use.
        """
        items: defaultdict[int, list[tuple[Place, Ended]]] = defaultdict(list)
        for one in ended:
            place = place_of(one.job_id)
            if place is not None:
                items[place.seq].append((place, one))
        known = await standings(
            self._pool.client, self._writes.keys, list(items), with_items=False
        )
        moved = 0
        for seq, jobs in items.items():
            standing = known.get(seq)
            mine = [
                (place, one)
                for place, one in jobs
                if standing is not None
                and standing.is_going
                and standing.generation == place.generation
            ]
            kept = {one.job_id for _, one in mine}
            await self._writes.forget(
                [one.job_id for _, one in jobs if one.job_id not in kept]
            )
            if standing is None or not mine:
                continue
            work = self._record(standing, mine)
            done = await self._ends.alone(standing, work, kept)
            moved += 1 if done is None else done
        await let_go(self._pool.client, ended, self._pool.job_keep_ms)
        return moved

    async def _record(
        self, standing: Standing, jobs: Sequence[tuple[Place, Ended]]
    ) -> int:
        document = await self._state.document(standing)
        failed = next(((p, e) for p, e in jobs if e.error is not None), None)
        if failed is not None:
            await self._ends.fail(standing, *failed)
            return 1
        recordings = [
            await self._recording(standing, document, place, one) for place, one in jobs
        ]
        return sum(await self._writes.record(recordings))

    async def _recording(
        self, standing: Standing, document: Document, place: Place, ended: Ended
    ) -> Recording:
        level = await self._state.level(standing, place.level)
        part = await self._part(standing, document, level, place, ended)
        return Recording(
            job_id=ended.job_id,
            seq=place.seq,
            generation=place.generation,
            level=place.level,
            index=place.index,
            of=len(level.windows),
            value=msgspec.json.encode(part).decode(),
            prompt_tokens=part.prompt_tokens,
            completion_tokens=part.completion_tokens,
            fell_back=part.fell_back is not None,
        )

    async def _part(
        self,
        standing: Standing,
        document: Document,
        level: Level,
        place: Place,
        ended: Ended,
    ) -> Part:
        """What a job gave, made fit: within its words, and never empty."""
        result = ended.result
        assert result is not None  # it has no error
        most, text, why = level.ask(self._spec).max_words, result.text.strip(), None
        if result.choices and result.choices[0].finish_reason is FinishReason.LENGTH:
            text = cut_at_sentence(text, least=most // 4)
        text = limit_words(without_repeats(text), most)
        if not text:
            why = "the model's summary was empty"
            _log.warning(
                "summary_by_key_sentences",
                run=place.run,
                seq=place.seq,
                part=place.node,
                why=why,
            )
            source = await self._state.source(standing, document, level, place.index)
            text = await self._pool.beside(partial(key_sentences, source, most))
        return Part(
            text=text,
            job_id=ended.job_id,
            fell_back=why,
            prompt_tokens=result.usage.prompt_tokens,
            completion_tokens=result.usage.completion_tokens,
        )
