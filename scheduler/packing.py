"""Fills groups with jobs, the least loaded first, without asking all for each. Pure."""

import heapq
from collections.abc import Collection, Sequence
from typing import Final

from ..shared.messages import JobClass
from .rooms import LONG, SHORT, SPILL_LOAD, Room, Shapes, length_of, load_of
from .snapshot import Assignment, Batch, GroupView, WaitingJob
from .targets import offers_of

MAX_SCANS: Final = 64
"""Jobs of a plan for which every group is asked; later ones ask the first few."""
PROBES: Final = 8
MAX_RESERVATIONS: Final = 16
"""Groups kept free for large jobs at most, in one plan."""
WARM_LOAD: Final = 0.125
"""A group that has a job's adapter in memory gets it though another is less loaded, by
this part of a group at most: a load of files costs less than a longer queue."""
PREFILL_PATIENCE_MS: Final = 10_000
"""Prefill credit comes back within steps; smaller prompts have taken it where a job
still waits for nothing else."""

_Entry = tuple[float, float, str, int]
_Heap = list[_Entry]
_Need = tuple[int, int, int]


class Packer:
    """Gives jobs to groups and remembers what did not fit.

    Args:
        groups: The live groups.
        short_tokens: Divides the length classes.
        bulk_turns: Groups whose bulk is not to be pushed out now.
    """

    def __init__(
        self,
        groups: Sequence[GroupView],
        short_tokens: int,
        bulk_turns: Collection[str] = (),
    ) -> None:
        self.shapes = Shapes(groups)
        self.batches: dict[tuple[str, JobClass, str], list[Assignment]] = {}
        self._short_tokens = short_tokens
        self._lengths: dict[str, str] = {}
        self._bulk_turns = bulk_turns
        self._views = [
            view
            for view in groups
            if view.free_running + view.bulk_running > 0 and not view.alone
        ]
        # A plan touches few of many groups: only those get a room.
        self._rooms: list[Room | None] = [None] * len(self._views)
        self._heaps: dict[tuple[str, str, str], _Heap] = {}
        """By version, weights and length class: a job goes to some of these alone."""
        self._heaps_of: dict[tuple[str, str], list[_Heap]] = {}
        self._warm: frozenset[str] = frozenset()
        """Adapters that some group has in memory."""
        for index, view in enumerate(self._views):
            load = load_of(view, view.free_blocks, view.free_running, view.free_tokens)
            entry = (load, view.step_ms, view.group, index)
            line = (view.version, view.weights, view.serves)
            self._heaps.setdefault(line, []).append(entry)
            if view.adapters:
                self._warm |= view.adapters
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._unmet: dict[tuple[object, ...], list[_Need]] = {}
        self._scans = 0
        self._reserved: list[Room] = []

    @property
    def rooms(self) -> list[Room]:
        """What is left of every group that runs no job alone and is not full."""
        return [self._room(index) for index in range(len(self._views))]

    def _room(self, index: int) -> Room:
        room = self._rooms[index]
        if room is None:
            view = self._views[index]
            room = Room(view, lends=view.group not in self._bulk_turns)
            self._rooms[index] = room
        return room

    def length(self, job: WaitingJob) -> str:
        """Returns the length class of a job: `short` or `long`."""
        length = self._lengths.get(job.bucket)
        if length is None:
            length = length_of(job.bucket, self._short_tokens)
            self._lengths[job.bucket] = length
        return length

    @property
    def bound(self) -> bool:
        """Whether some group with room is bound to a length class."""
        return any(serves != "any" for *_, serves in self._heaps)

    def has_room(self, job_class: JobClass) -> bool:
        """Whether anything of this class may still fit anywhere."""
        bulk = job_class is JobClass.BULK
        for heap in self._heaps.values():
            while heap:
                room = self._room(heap[0][-1])
                if not room.exhausted and (not bulk or room.open_to_bulk):
                    return True
                heapq.heappop(heap)  # bulk comes last: nobody else will ask for it
        return False

    def is_hopeless(self, job: WaitingJob) -> bool:
        """Whether a job that needs no more than this one has found no room."""
        return self._is_unmet(job, self._unmet_by(job, spill=False))

    def _unmet_by(self, job: WaitingJob, *, spill: bool) -> list[_Need]:
        kind = (job.job_class, self.length(job), job.schema, spill)
        key = (*kind, job.needs, job.tokenizer) if job.needs else kind
        return self._unmet.setdefault(key, [])

    def _is_unmet(self, job: WaitingJob, unmet: list[_Need]) -> bool:
        # Rooms only shrink, so what did not fit once stands for all that need more.
        for choices, tokens, total in unmet:
            if (
                choices <= job.choices
                and tokens <= job.tokens
                and total <= job.choices * (job.tokens + job.max_tokens)
            ):
                return True
        return False

    def place(self, job: WaitingJob, *, spill: bool = False) -> Room | None:
        """Gives the job to a group that has room for it.

        Args:
            job: The job.
            spill: Asks the nearly idle groups of the other length class instead of
                those bound to the job's own and those bound to none.

        Returns:
            The group's room, or None where it fits nowhere.
        """
        unmet = self._unmet_by(job, spill=spill)
        if self._is_unmet(job, unmet):
            return None
        probes = None if self._scans < MAX_SCANS else PROBES
        for serves in self._tiers(job, self.length(job), spill=spill):
            room = self._place_in(self._open_to(job, serves), job, spill, probes)
            if room is not None:
                return room
        if probes is None:
            self._scans += 1
            total = job.choices * (job.tokens + job.max_tokens)
            unmet.append((job.choices, job.tokens, total))
        return None

    def _tiers(self, job: WaitingJob, length: str, *, spill: bool) -> tuple[str, ...]:
        other = SHORT if length == LONG else LONG
        if spill:
            return (other,)
        if self.shapes.has_home(job, length):
            return (length, "any")
        return (length, "any", other)

    def _open_to(self, job: WaitingJob, serves: str) -> list[_Heap]:
        """Groups of a length class that the job may go to."""
        heaps = self._heaps_of.get((job.needs, serves))
        if heaps is None:
            heaps = [
                heap
                for (version, weights, name), heap in self._heaps.items()
                if name == serves
                and (not job.needs or job.needs in offers_of(version, weights))
            ]
            self._heaps_of[job.needs, serves] = heaps
        return heaps

    def _place_in(
        self, heaps: list[_Heap], job: WaitingJob, spill: bool, most: int | None
    ) -> Room | None:
        # Bulk finds no room where interactive jobs have pushed bulk out.
        limit = 1.0 if job.job_class is JobClass.BULK else float("inf")
        passed: list[tuple[_Heap, _Entry]] = []
        placed: Room | None = None
        while placed is None and (most is None or len(passed) < most):
            heap = _least_loaded(heaps)
            if heap is None:
                break
            if heap[0][0] >= limit or (spill and heap[0][0] > SPILL_LOAD):
                break  # the others are fuller still
            passed.append((heap, heapq.heappop(heap)))
            if self._room(passed[-1][1][-1]).fits(job):
                warm = job.adapter in self._warm and not spill
                at = self._warmest(heaps, job, passed) if warm else len(passed) - 1
                heap, entry = passed[at]
                placed = self._room(entry[-1])
                self.give(placed, job)
                passed[at] = heap, (placed.load, *entry[1:])
        for heap, entry in passed:
            if not self._room(entry[-1]).exhausted:
                heapq.heappush(heap, entry)
        return placed

    def _warmest(
        self, heaps: list[_Heap], job: WaitingJob, passed: list[tuple[_Heap, _Entry]]
    ) -> int:
        """Finds a group with the job's adapter that is hardly fuller than the first.

        No job waits for that, and none is pushed out for it.

        Args:
            heaps: Of the groups that the job may go to.
            job: It fits into the group that was passed last.
            passed: Taken off the heaps; gets those that are looked at.

        Returns:
            Where the group stands in `passed`; the last one of before where no group
            is better.
        """
        first = len(passed) - 1
        if job.adapter in self._views[passed[first][1][-1]].adapters:
            return first
        highest = min(passed[first][1][0] + WARM_LOAD, 1.0)
        for _ in range(PROBES):
            heap = _least_loaded(heaps)
            if heap is None or heap[0][0] > highest:
                break
            passed.append((heap, heapq.heappop(heap)))
            room = self._room(passed[-1][1][-1])
            warm = job.adapter in room.view.adapters and room.fits(job)
            if warm and not room.takes_from_bulk(job):
                return len(passed) - 1
        return first

    def give(self, room: Room, job: WaitingJob) -> None:
        """Gives the job to a group; the caller knows that it fits."""
        key = (room.view.group, job.job_class, job.bucket)
        self.batches.setdefault(key, []).append(room.take(job))

    def reserve(self, job: WaitingJob, waited_ms: int) -> None:
        """Keeps a group that could hold the job free of others, if that helps.

        It does where blocks are missing everywhere, or slots for several choices.
        Jobs that the same group could hold share the reservation, one after another.

        Args:
            job: It has found no room.
            waited_ms: For how long it has waited.
        """
        bulk = job.job_class is JobClass.BULK
        if len(self._reserved) >= MAX_RESERVATIONS:
            return
        for room in self._reserved:
            if room.view.could_hold(job):
                room.lent = room.lent and not bulk
                return
        homes = self._tiers(job, self.length(job), spill=False)
        able: list[Room] = []
        for room in self.rooms:
            if room.closed or not room.view.could_hold(job):
                continue
            home = room.view.serves in homes
            if home and waited_ms < PREFILL_PATIENCE_MS and not room.is_short(job):
                return
            able.append(room)
        at_home = [room for room in able if room.view.serves in homes] or able
        if at_home:
            emptiest = max(
                at_home, key=lambda r: (r.blocks + r.bulk_blocks, r.view.group)
            )
            emptiest.reserved = True
            emptiest.lent = emptiest.lends and not bulk
            self._reserved.append(emptiest)

    def result(self) -> tuple[Batch, ...]:
        """Returns what was given, by group, class and bucket."""
        return tuple(
            Batch(group=group, job_class=kind, bucket=bucket, assignments=tuple(jobs))
            for (group, kind, bucket), jobs in self.batches.items()
        )


def _least_loaded(heaps: Sequence[_Heap]) -> _Heap | None:
    """The heap with the least loaded group of all; None where all are empty."""
    if len(heaps) == 1:
        return heaps[0] or None
    return min((heap for heap in heaps if heap), key=lambda heap: heap[0], default=None)
