"""Which waiting jobs go to which worker group now: one pure function.

Interactive first, bulk fills what is left. Inside a class the order is `FairQueue`'s.
A batch holds jobs of one class and one length bucket; it never exceeds the group's
prefill budget, running slots or KV blocks.
"""

import heapq
from collections.abc import Sequence
from typing import Final

from ..shared.messages import JobClass
from .fairness import FairQueue, remember
from .snapshot import Assignment, Batch, GroupView, Plan, Snapshot, WaitingJob

MAX_MISSES: Final = 64
"""Jobs in a row that fit nowhere before the rest of the class is left for later."""
RESERVE_AFTER_MS: Final = 2_000
"""A job that fits nowhere for this long gets a group kept free for it."""
BULK_PATIENCE_MS: Final = 30_000
"""Bulk that waited this long behind interactive work gets a turn now and then."""
BULK_SHARE: Final = 16
"""One part in this many of the tokens goes to impatient bulk."""

_BatchKey = tuple[str, JobClass, str]


class _Room:
    """What is left of one group while a plan is made."""

    def __init__(self, view: GroupView) -> None:
        self.view = view
        self.blocks = view.free_blocks
        self.running = view.free_running
        self.tokens = view.free_tokens
        self.reserved = False

    @property
    def load(self) -> float:
        """The fullest of its three resources, 0 (empty) to 1 (full)."""
        view = self.view
        return 1.0 - min(
            self.blocks / max(view.total_blocks, 1),
            self.running / max(view.max_running, 1),
            self.tokens / max(view.batch_tokens, 1),
        )

    def fits(self, job: WaitingJob) -> bool:
        view = self.view
        if self.reserved or not view.could_hold(job):
            return False
        if view.cost_blocks(job) > self.blocks:
            return False
        # More choices than the group runs at once go when it is empty, and a prefill
        # larger than the whole budget when no other is going on.
        return _within(job.choices, self.running, view.max_running) and _within(
            job.prefill_tokens, self.tokens, view.batch_tokens
        )

    def take(self, job: WaitingJob) -> Assignment:
        cost = self.view.cost_blocks(job)
        self.blocks -= cost
        self.running -= job.choices
        self.tokens -= job.prefill_tokens
        return Assignment(job.id, job.tokens, cost, job.choices)


def _within(need: int, left: int, whole: int) -> bool:
    """Whether a need fits; one above the whole fits when all of it is left."""
    return need <= left or need > whole <= left


class _Packer:
    """Fills groups with jobs, the least loaded first."""

    def __init__(self, groups: Sequence[GroupView]) -> None:
        self.rooms = [_Room(view) for view in groups]
        self._heap = [self._entry(index) for index in range(len(self.rooms))]
        heapq.heapify(self._heap)
        self.batches: dict[_BatchKey, list[Assignment]] = {}

    def _entry(self, index: int) -> tuple[float, float, str, int]:
        view = self.rooms[index].view
        return self.rooms[index].load, view.step_ms, view.group, index

    def place(self, job: WaitingJob) -> bool:
        """Gives the job to the least loaded group that has room for it."""
        passed: list[tuple[float, float, str, int]] = []
        placed = False
        while self._heap and not placed:
            entry = heapq.heappop(self._heap)
            room = self.rooms[entry[-1]]
            if room.fits(job):
                key = (room.view.group, job.job_class, job.bucket)
                self.batches.setdefault(key, []).append(room.take(job))
                entry, placed = self._entry(entry[-1]), True
            passed.append(entry)
        for entry in passed:
            # A full group stays out: nothing can be added to it in this plan.
            if self.rooms[entry[-1]].running > 0:
                heapq.heappush(self._heap, entry)
        return placed

    @property
    def is_full(self) -> bool:
        return not self._heap

    def reserve(self, job: WaitingJob, *, every: bool) -> None:
        """Keeps one group (or every one) that could hold the job free of others."""
        able = [room for room in self.rooms if room.view.could_hold(job)]
        if not every and able:
            able = [max(able, key=lambda room: (room.blocks, room.view.group))]
        for room in able:
            room.reserved = True


def plan(snapshot: Snapshot, now_ms: int) -> Plan:
    """Decides what is dispatched now.

    Args:
        snapshot: Waiting jobs, live groups, and what earlier plans remembered.
        now_ms: The clock of Redis.

    Returns:
        Batches to dispatch, when to look again, and what to remember. Nothing is
        changed elsewhere; the same arguments give the same plan.
    """
    by_class, impossible = _split(snapshot, now_ms)
    packer = _Packer(snapshot.groups)
    queues = {
        job_class: FairQueue(jobs, snapshot.fairness, snapshot.weights, now_ms)
        for job_class, jobs in by_class.items()
    }
    turn = _bulk_turn(by_class, queues[JobClass.BULK], packer, snapshot, now_ms)
    since_bulk = 0 if turn else snapshot.fairness.since_bulk
    wake_in_ms: int | None = None
    for job_class in (JobClass.INTERACTIVE, JobClass.BULK):
        wake_in_ms = _hold_ms(by_class[job_class], snapshot, now_ms)
        if wake_in_ms is not None:
            break  # bulk must not take the room that held interactive jobs will share
        given, complete = _fill(queues[job_class], packer, now_ms)
        if job_class is JobClass.INTERACTIVE:
            since_bulk = since_bulk + given if by_class[JobClass.BULK] else 0
            if not complete:
                break
    return Plan(
        batches=tuple(
            Batch(group=group, job_class=kind, bucket=bucket, assignments=tuple(jobs))
            for (group, kind, bucket), jobs in packer.batches.items()
        ),
        wake_in_ms=wake_in_ms,
        fairness=remember(
            snapshot.fairness, queues.values(), since_bulk=since_bulk, now_ms=now_ms
        ),
        impossible=impossible,
    )


def _split(
    snapshot: Snapshot, now_ms: int
) -> tuple[dict[JobClass, list[WaitingJob]], tuple[str, ...]]:
    """Sorts jobs by class; leaves out what is expired and what fits no live group."""
    by_class: dict[JobClass, list[WaitingJob]] = {c: [] for c in JobClass}
    impossible = []
    for job in snapshot.jobs:
        if job.deadline_ms is not None and job.deadline_ms <= now_ms:
            continue
        if not snapshot.groups or any(g.could_hold(job) for g in snapshot.groups):
            by_class[job.job_class].append(job)
        else:
            impossible.append(job.id)
    return by_class, tuple(sorted(impossible))


def _bulk_turn(
    by_class: dict[JobClass, list[WaitingJob]],
    queue: FairQueue,
    packer: _Packer,
    snapshot: Snapshot,
    now_ms: int,
) -> bool:
    """Gives impatient bulk one job ahead of interactive work, if it is due."""
    bulk = by_class[JobClass.BULK]
    if not bulk or not by_class[JobClass.INTERACTIVE]:
        return False
    oldest = min(bulk, key=lambda job: (job.enqueued_ms, job.id))
    impatient = now_ms - oldest.enqueued_ms >= BULK_PATIENCE_MS
    earned = snapshot.fairness.since_bulk >= (BULK_SHARE - 1) * oldest.prefill_tokens
    if not impatient or not earned:
        return False
    job = queue.pop()
    if job is None:
        return False
    given = packer.place(job)
    if not given:
        packer.reserve(job, every=False)
    queue.settle(job, given=given)
    return given


def _fill(queue: FairQueue, packer: _Packer, now_ms: int) -> tuple[int, bool]:
    """Places the jobs of one class in order.

    Returns:
        Prompt tokens given out, for each choice, and whether every job was looked at.
        Groups that could hold a job that was left over are then reserved for it.
    """
    given, misses = 0, 0
    left: list[WaitingJob] = []
    while not packer.is_full and misses < MAX_MISSES:
        job = queue.pop()
        if job is None:
            for waiting in left:
                packer.reserve(waiting, every=True)
            return given, True
        placed = packer.place(job)
        queue.settle(job, given=placed)
        if placed:
            given, misses = given + job.prefill_tokens, 0
            continue
        left.append(job)
        misses += 1
        if now_ms - job.enqueued_ms >= RESERVE_AFTER_MS:
            # Smaller jobs must not take every block that is given back.
            packer.reserve(job, every=False)
    return given, False


def _hold_ms(jobs: list[WaitingJob], snapshot: Snapshot, now_ms: int) -> int | None:
    """Returns how long the class waits for a fuller batch, or None to go now.

    A group in mid-step takes nothing before the step ends, so waiting half a step
    costs little and spares it many small prefills. A group that is idle, a batch that
    cannot grow, or no arrivals to expect: no wait.
    """
    open_groups = [group for group in snapshot.groups if group.free_running > 0]
    if not jobs or not open_groups or any(group.idle for group in open_groups):
        return None
    window = min(snapshot.max_wait_ms, min(g.step_ms for g in open_groups) / 2)
    waited = now_ms - min(job.enqueued_ms for job in jobs)
    expected = snapshot.arrivals_per_s * (window - waited) / 1000
    slots = sum(group.free_running for group in open_groups)
    budget = sum(group.free_tokens for group in open_groups)
    choices = sum(job.choices for job in jobs)
    full = choices >= slots or sum(job.prefill_tokens for job in jobs) >= budget
    if full or waited >= window or expected < 1.0:
        return None
    return max(1, int(window - waited))
