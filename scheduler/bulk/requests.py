"""Runs of kind `run`: each item is one job."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from ...shared.bulk.job_ids import Place, place_of
from ...shared.bulk.messages import Outcome, RunSpec, Settled
from ...shared.bulk.writes import NewOutcome, Opening, RunWrites
from ...shared.lifecycle import State
from ...shared.messages import JobClass, JobError, Prompt
from ...shared.new_job import new_job
from ...shared.script_types import NewJob
from ..outage import REDIS_ERRORS
from .faults import as_job_error
from .items import Standing, standings
from .pool import BulkPool
from .results import Ended, let_go
from .sending import Sent, send

OPENED: Final = "open"
"""An item's cursor once its job is open."""


def settled_as(ended: Ended) -> Settled:
    """Returns how an item settles whose job ended so."""
    if ended.error is None:
        return "succeeded"
    return "cancelled" if ended.state == State.CANCELLED else "failed"


class Requests:
    """One run of requests.

    Args:
        pool: The process's view of the pool.
        writes: Of the run.
        spec: The run's.
    """

    def __init__(self, pool: BulkPool, writes: RunWrites, spec: RunSpec) -> None:
        self._pool = pool
        self._writes = writes
        self._spec = spec

    async def record(self, ended: Sequence[Ended]) -> int:
        """Settles the items of jobs that have ended.

        Returns:
            How many settled now.
        """
        places = {one.job_id: place_of(one.job_id) for one in ended}
        seqs = [place.seq for place in places.values() if place is not None]
        known = await standings(self._pool.client, self._writes.keys, seqs)
        outcomes: list[NewOutcome] = []
        strays: list[str] = []
        for one in ended:
            place = places[one.job_id]
            standing = known.get(place.seq) if place is not None else None
            is_ours = standing is not None and standing.item is not None
            if place is None or not is_ours or standing is None:
                strays.append(one.job_id)
                continue
            outcomes.append(_outcome(place, standing, one))
        settled = await self._writes.settle(outcomes)
        await self._writes.forget(strays)
        await let_go(self._pool.client, ended, self._pool.job_keep_ms)
        return sum(settled)

    async def start(self, seqs: Sequence[int], room: int) -> Sent:
        """Opens and sends the jobs of items.

        Args:
            seqs: Items that are ready.
            room: Most jobs to open.
        """
        known = await standings(self._pool.client, self._writes.keys, seqs[:room])
        gone = [seq for seq in seqs[:room] if not _can_start(known.get(seq))]
        await self._writes.not_ready(gone)
        jobs, refused = await self._made(known)
        openings = [
            Opening(
                seq=seq,
                generation=known[seq].generation,
                cursor="",
                next_cursor=OPENED,
                more=False,
                ids=(str(job.id),),
            )
            for seq, job in jobs.items()
        ]
        opened = await self._writes.open(openings)
        moved = [job for job, ok in zip(jobs.values(), opened, strict=True) if ok]
        sent = await send(self._pool, self._writes, moved)
        await self._refuse(known, refused, sent)
        return msgspec.structs.replace(sent, moved=len(seqs[:room]))

    async def resend(self, job_ids: Sequence[str]) -> Sent:
        """Enqueues open jobs that may not be in the queue."""
        places = {i: p for i in job_ids if (p := place_of(i)) is not None}
        seqs = [place.seq for place in places.values()]
        known = await standings(self._pool.client, self._writes.keys, seqs)
        mine = {
            seq: known[seq]
            for place in places.values()
            if (seq := place.seq) in known
            and known[seq].is_going
            and known[seq].generation == place.generation
        }
        kept = {i for i, place in places.items() if place.seq in mine}
        await self._writes.forget([i for i in job_ids if i not in kept])
        jobs, refused = await self._made(mine)
        sent = await send(self._pool, self._writes, list(jobs.values()))
        await self._refuse(mine, refused, sent)
        return sent

    async def _made(
        self, known: Mapping[int, Standing]
    ) -> tuple[dict[int, NewJob], dict[int, JobError]]:
        """The jobs of items by seq, and what is wrong with those that have none."""
        settings = await self._pool.settings()
        jobs: dict[int, NewJob] = {}
        refused: dict[int, JobError] = {}
        for seq, standing in known.items():
            item = standing.item
            if item is None or item.prompt is None:
                if standing.is_going:
                    refused[seq] = JobError("invalid_request", "it has no prompt")
                continue
            prompt = self._prompt(item.prompt)
            place = Place(self._writes.keys.run, seq, standing.generation)
            try:
                card = await self._pool.card(prompt.model)
                adapter = await self._pool.adapters.ref(prompt)
                made = new_job(prompt, card, settings, place.unique, adapter)
            except REDIS_ERRORS:
                raise
            except Exception as error:  # noqa: BLE001 - any fault is this item's alone
                run = self._writes.keys.run
                refused[seq] = as_job_error(error, run=run, seq=seq)
                continue
            jobs[seq] = msgspec.structs.replace(made, keep_ms=self._pool.job_keep_ms)
        return jobs, refused

    def _prompt(self, prompt: Prompt) -> Prompt:
        """Whose it is, and how urgent, is for the run to say."""
        return msgspec.structs.replace(
            prompt,
            tenant=self._spec.tenant,
            job_class=JobClass.BULK,
            priority=prompt.priority or self._spec.priority,
            idempotency_key=None,
        )

    async def _refuse(
        self,
        known: Mapping[int, Standing],
        refused: Mapping[int, JobError],
        sent: Sent,
    ) -> None:
        errors = dict(refused)
        for job_id, error in sent.refused.items():
            place = place_of(job_id)
            if place is not None:
                errors[place.seq] = error
        ids = {p.seq: i for i in sent.refused if (p := place_of(i)) is not None}
        await self._writes.settle(
            [
                NewOutcome(
                    outcome=Outcome(
                        seq=seq,
                        generation=known[seq].generation,
                        custom_id=item.custom_id if (item := known[seq].item) else "",
                        state="failed",
                        error=error,
                    ),
                    open_ids=(ids[seq],) if seq in ids else (),
                )
                for seq, error in errors.items()
            ]
        )


def _can_start(standing: Standing | None) -> bool:
    return standing is not None and standing.is_going and not standing.cursor


def _outcome(place: Place, standing: Standing, ended: Ended) -> NewOutcome:
    item, result = standing.item, ended.result
    made = Outcome(
        seq=place.seq,
        generation=place.generation,
        custom_id=item.custom_id if item else "",
        state=settled_as(ended),
        result=result,
        error=ended.error,
        job_ids=(ended.job_id,),
    )
    if result is not None:
        made = msgspec.structs.replace(made, usage=result.usage, timings=result.timings)
    return NewOutcome(outcome=made, open_ids=(ended.job_id,), jobs=1)
