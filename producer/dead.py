"""Dead letters for operators: what failed for good, and running it once more."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from ..shared.clock import time_ms
from ..shared.errors import ProtocolError, QueueFull, TokenmillError, UnknownJob
from ..shared.keys import SHARDS, Keys, is_shard
from ..shared.script_types import NewJob
from .dead_letter import DeadLetter, Requeued, again, id_of, problem, shown
from .listing import as_text
from .session import Session
from .submit import Submission, WhenFull

if TYPE_CHECKING:
    from ..shared.scripts_dead import Letter

_PAGE: Final = 200
"""Records, or jobs to be requeued, per round trip."""
Ids = str | Iterable[str] | None
_log: Final = logging.getLogger("tokenmill.producer")


class _Found(msgspec.Struct, frozen=True):
    keys: Keys
    letter: "Letter"
    shown: DeadLetter
    record: Mapping[str, str]


class DeadLetters:
    """The dead letters of a pool, over all its shards.

    Args:
        session: The client's connections.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    async def find(self, ids: Ids = None) -> list[DeadLetter]:
        """Returns letters, newest first.

        Args:
            ids: One, several, or None for all.

        Raises:
            UnknownJob: There is no letter of such an id.
        """
        return [found.shown for found in await self._find(ids)]

    async def requeue(
        self,
        ids: Ids,
        *,
        when_full: WhenFull = "raise",
        wait_s: float | None = None,
    ) -> list[Requeued]:
        """Makes new jobs of dead ones: the same request, class, tenant, priority, seed.

        Attempts and losses count from zero; a deadline, a delay and an idempotency key
        are not kept. The new id follows from the old one, so that a letter becomes one
        job however often, and from however many places, it is requeued.

        Args:
            ids: One, several, or None for all.
            when_full: Whether a full queue is an error or is waited out.
            wait_s: Seconds to wait for room at most; None waits for ever.

        Returns:
            One for each letter, newest first.

        Raises:
            UnknownJob: There is no letter of such an id; nothing was requeued.
            QueueFull: No room was found; what came before is requeued.
        """
        found = await self._find(ids)
        give_up = None if wait_s is None else time.monotonic() + wait_s
        made: dict[str, Requeued] = {}
        for start in range(0, len(found), _PAGE):
            page = found[start : start + _PAGE]
            left_s = None if give_up is None else max(give_up - time.monotonic(), 0.0)
            made |= await self._requeue(page, when_full, left_s)
        return [made[one.shown.id] for one in found]

    async def purge(self, ids: Ids, *, older_than_ms: int | None = None) -> int:
        """Removes letters; what they kept goes as that of any other job does.

        Args:
            ids: One, several, or None for all.
            older_than_ms: Only those buried at least so long ago.

        Returns:
            How many were removed.

        Raises:
            UnknownJob: There is no letter of such an id; nothing was removed.
        """
        found = await self._find(ids)
        if older_than_ms is not None:
            latest = await self._now_ms() - older_than_ms
            found = [one for one in found if one.letter.at_ms <= latest]
        shards = {one.keys.shard: one.keys for one in found}
        removed = 0
        for shard, keys in shards.items():
            letters = [one.letter for one in found if one.keys.shard == shard]
            removed += await self._session.scripts(keys).purge_letters(letters)
        return removed

    async def _now_ms(self) -> int:
        (reply,) = await self._session.read(("TIME",))
        return time_ms(reply)

    # --- reading -------------------------------------------------------------------
    async def _find(self, ids: Ids) -> list[_Found]:
        wanted = {ids} if isinstance(ids, str) else None if ids is None else set(ids)
        pairs: list[tuple[Keys, Letter]] = []
        for keys in await self._shards():
            try:
                scripts = self._session.scripts(keys)
                letters = await self._session.patiently(scripts.letters)
            except ProtocolError as error:
                _log.warning("shard %s is left out: %s", keys.shard, error)
                continue
            pairs += [
                (keys, letter)
                for letter in letters
                if wanted is None or id_of(keys, letter) in wanted
            ]
        missing = (wanted or set()) - {id_of(keys, letter) for keys, letter in pairs}
        if missing:
            raise UnknownJob(
                f"no dead letter of '{min(missing)[:120]}'; `tokenmill dead list` "
                "shows all there are"
            )
        pairs.sort(key=lambda pair: (-pair[1].at_ms, pair[1].entry))
        found: list[_Found] = []
        for start in range(0, len(pairs), _PAGE):
            found += await self._described(pairs[start : start + _PAGE])
        return found

    async def _shards(self) -> list[Keys]:
        (members,) = await self._session.read(("SMEMBERS", SHARDS))
        names = sorted(member.decode(errors="replace") for member in members)
        return [Keys.of_shard(name) for name in names if is_shard(name)]

    async def _described(self, pairs: Iterable[tuple[Keys, "Letter"]]) -> list[_Found]:
        pairs = list(pairs)
        rows = await self._session.read_each(
            *(("HGETALL", keys.job(letter.job_id)) for keys, letter in pairs)
        )
        found: list[_Found] = []
        for (keys, letter), row in zip(pairs, rows, strict=True):
            record = {} if isinstance(row, ProtocolError) else as_text(row)
            found.append(_Found(keys, letter, shown(keys, letter, record), record))
        return found

    # --- running again ---------------------------------------------------------------
    async def _requeue(
        self, page: Sequence[_Found], when_full: WhenFull, wait_s: float | None
    ) -> dict[str, Requeued]:
        inputs = await self._session.read_each(
            *(("GET", one.keys.input(one.letter.job_id)) for one in page)
        )
        made: dict[str, Requeued] = {}
        jobs: list[tuple[_Found, NewJob]] = []
        for one, payload in zip(page, inputs, strict=True):
            letter_id = one.shown.id
            if one.shown.requeued_as:
                made[letter_id] = Requeued(id=letter_id, job=one.shown.requeued_as)
                continue
            try:
                jobs.append((one, again(one.letter, one.record, payload)))
            except (TokenmillError, ValueError, KeyError) as error:
                made[letter_id] = Requeued(id=letter_id, problem=problem(error))
        pool = await self._session.patiently(self._session.view.pool)
        refused = await self._submit(
            jobs, Submission(self._session, pool, when_full, wait_s)
        )
        for index, (one, job) in enumerate(jobs):
            refusal = refused.get(index)
            made[one.shown.id] = Requeued(
                id=one.shown.id,
                job=str(job.id) if refusal is None else None,
                problem=None if refusal is None else str(refusal),
            )
        return made

    async def _submit(
        self, jobs: Sequence[tuple[_Found, NewJob]], submission: Submission
    ) -> dict[int, TokenmillError]:
        """Enqueues and marks; returns what was refused, by position."""
        try:
            await submission.enqueue([job for _, job in jobs])
        except TokenmillError as error:
            await self._mark([p for p in jobs if str(p[1].id) in set(error.enqueued)])
            if not error.refused:
                raise
            for refusal in error.refused.values():
                if isinstance(refusal, QueueFull):
                    refusal.enqueued, refusal.refused = error.enqueued, error.refused
                    raise refusal from None
            return dict(error.refused)
        await self._mark(jobs)
        return {}

    async def _mark(self, jobs: Sequence[tuple[_Found, NewJob]]) -> None:
        marks: dict[str, list[tuple[str, str]]] = {}
        shards: dict[str, Keys] = {}
        for one, job in jobs:
            shards[one.keys.shard] = one.keys
            mark = (one.letter.job_id, str(job.id))
            marks.setdefault(one.keys.shard, []).append(mark)
        for shard, pairs in marks.items():
            await self._mark_in(shards[shard], pairs)

    async def _mark_in(self, keys: Keys, pairs: Sequence[tuple[str, str]]) -> None:
        # The jobs are there already: without its mark a letter would seem untouched.
        scripts = self._session.scripts(keys)
        await self._session.patiently(lambda: scripts.mark_requeued(pairs))
