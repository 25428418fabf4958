"""Which waiting jobs go to which worker group now: one pure function.

Interactive first, bulk fills what is left. Inside a class the order is `FairQueue`'s.
A batch holds jobs of one class and one length bucket; it never exceeds the group's
prefill budget, running slots or KV blocks.
"""

from typing import Final

from ..shared.messages import JobClass
from .fairness import OVERDUE_MS, FairQueue, remember
from .packing import Packer
from .rooms import LONG, SHORT, PoolState, Shapes
from .snapshot import Plan, Snapshot, WaitingJob
from .turns import (
    BULK_PATIENCE_MS,
    BULK_SHARE,
    RESERVE_AFTER_MS,
    bulk_turns,
    place_suspects,
)

LOOK_AHEAD: Final = (32, 128, 512)
"""After so many jobs without room, the others are looked at all at once."""
_ByClass = dict[JobClass, list[WaitingJob]]


def plan(snapshot: Snapshot, now_ms: int) -> Plan:
    """Decides what is dispatched now.

    Args:
        snapshot: Waiting jobs, live groups, and what earlier plans remembered.
        now_ms: The clock of Redis.

    Returns:
        Batches to dispatch, when to look again, and what to remember. Nothing is
        changed elsewhere; the same arguments give the same plan.
    """
    before = snapshot.fairness
    turns = bulk_turns(snapshot.groups, before, now_ms)
    pushed, restored = turns.pushed_ms, turns.restored_ms
    packer = Packer(snapshot.groups, snapshot.short_tokens, turns.groups)
    by_class, suspects, impossible = _split(snapshot, packer.shapes, now_ms)
    pool = PoolState(snapshot.groups)
    queues = _Queues(by_class, snapshot, pool.step_ms, now_ms)
    alone: list[WaitingJob] = []
    others_turn = before.suspect_had_turn and _some_could_run(by_class, packer.shapes)
    if not (others_turn and len(snapshot.groups) == 1):
        alone = place_suspects(suspects, packer, snapshot.groups, now_ms)
    for job in alone:
        queues[job.job_class].charge(job)
    turn = _bulk_turn(by_class, queues, packer, snapshot, now_ms)
    since_bulk = before.since_bulk
    if turn is not None:
        since_bulk, pushed = 0, {**pushed, turn: now_ms - BULK_PATIENCE_MS}
        restored = {**restored, turn: now_ms}
    tokens, wake_in_ms = _fill_classes(by_class, queues, packer, pool, snapshot, now_ms)
    since_bulk = since_bulk + tokens if by_class[JobClass.BULK] else 0
    batches = packer.result()
    others = sum(len(batch.assignments) for batch in batches) - len(alone)
    gave_bulk = any(batch.job_class is JobClass.BULK for batch in batches)
    gave_up_turn = others_turn and not others
    return Plan(
        batches=batches,
        wake_in_ms=wake_in_ms,
        fairness=remember(
            before,
            queues.built(),
            since_bulk=since_bulk,
            bulk_at_ms=now_ms if gave_bulk else before.bulk_at_ms,
            pushed_ms=pushed,
            restored_ms=restored,
            suspect_had_turn=bool(alone) or gave_up_turn,
            now_ms=now_ms,
        ),
        impossible=impossible,
    )


def _fill_classes(
    by_class: _ByClass,
    queues: "_Queues",
    packer: Packer,
    pool: PoolState,
    snapshot: Snapshot,
    now_ms: int,
) -> tuple[int, int | None]:
    """Places interactive jobs, then bulk.

    Returns:
        Interactive prompt tokens given out, and when a held batch is to go.
    """
    left: list[WaitingJob] = []
    interactive = 0
    for job_class in (JobClass.INTERACTIVE, JobClass.BULK):
        jobs = by_class[job_class]
        wake_in_ms = _hold_ms(jobs, snapshot, pool, job_class, now_ms)
        if wake_in_ms is not None:
            # Bulk must not take the room that held interactive jobs will share.
            return interactive, wake_in_ms
        if jobs and packer.has_room(job_class):
            tokens = _fill(queues[job_class], packer, job_class, left, now_ms)
            interactive += tokens if job_class is JobClass.INTERACTIVE else 0
    return interactive, None


def _split(
    snapshot: Snapshot, shapes: Shapes, now_ms: int
) -> tuple[_ByClass, list[WaitingJob], tuple[str, ...]]:
    """Sorts jobs by class, suspects apart; names those that no live group could hold.

    Expired jobs are left out: the reaper ends them. A job that can no longer make its
    deadline waits on until then, since rates are estimates. Left out are also jobs that
    no live group is meant for: they hold up nobody and reserve nothing.
    """
    by_class: _ByClass = {c: [] for c in JobClass}
    suspects: list[WaitingJob] = []
    impossible: list[str] = []
    for job in snapshot.jobs:
        if job.deadline_ms is not None and job.deadline_ms <= now_ms:
            continue
        if job.needs and job.needs not in shapes.offered:
            continue
        large = job.choices > 1 or job.tokens + job.max_tokens > shapes.sure_tokens
        if large and shapes.impossible(job):
            impossible.append(job.id)
        elif job.alone:
            suspects.append(job)
        else:
            by_class[job.job_class].append(job)
    return by_class, suspects, tuple(sorted(impossible))


def _some_could_run(by_class: _ByClass, shapes: Shapes) -> bool:
    """Whether some group could hold one of these jobs.

    A turn left to others that never run, as to those with a record that no group
    reads, would have no end.
    """
    return any(shapes.could_hold(job) for jobs in by_class.values() for job in jobs)


class _Queues:
    """The order of each class, made when it is asked for."""

    def __init__(
        self, by_class: _ByClass, snapshot: Snapshot, step_ms: float, now_ms: int
    ) -> None:
        self._by_class = by_class
        self._step_ms = step_ms
        self._snapshot = snapshot
        self._now_ms = now_ms
        self._made: dict[JobClass, FairQueue] = {}

    def __getitem__(self, job_class: JobClass) -> FairQueue:
        if job_class not in self._made:
            snapshot = self._snapshot
            self._made[job_class] = FairQueue(
                self._by_class[job_class],
                snapshot.fairness,
                snapshot.weights,
                self._now_ms,
                step_ms=self._step_ms,
                made_ratio=snapshot.made_ratio.get(job_class, 1.0),
            )
        return self._made[job_class]

    def built(self) -> list[FairQueue]:
        """Returns those that were asked for."""
        return list(self._made.values())


def _bulk_turn(
    by_class: _ByClass,
    queues: _Queues,
    packer: Packer,
    snapshot: Snapshot,
    now_ms: int,
) -> str | None:
    """Gives impatient bulk one job ahead of interactive work, if it is due.

    Returns:
        The group that got it; it is not to be pushed out there for a turn.
    """
    bulk = by_class[JobClass.BULK]
    if not bulk or not by_class[JobClass.INTERACTIVE]:
        return None
    oldest = min(bulk, key=lambda job: (job.enqueued_ms, job.id))
    impatient = now_ms - oldest.enqueued_ms >= BULK_PATIENCE_MS
    before = snapshot.fairness
    earned = before.since_bulk >= (BULK_SHARE - 1) * oldest.prefill_tokens
    overdue = now_ms - max(before.bulk_at_ms, oldest.enqueued_ms) >= OVERDUE_MS
    if not impatient or not (earned or overdue):
        return None
    queue = queues[JobClass.BULK]
    job = queue.pop()
    if job is None:
        return None
    room = packer.place(job)
    queue.settle(job, given=room is not None)
    if room is None:
        packer.reserve(job, now_ms - job.enqueued_ms)
        return None
    room.lends = False
    return room.view.group


def _fill(
    queue: FairQueue,
    packer: Packer,
    job_class: JobClass,
    left: list[WaitingJob],
    now_ms: int,
) -> int:
    """Places the jobs of one class in order.

    Bulk may fill what an interactive job waits for: it makes room at once.

    Args:
        queue: The order.
        packer: The groups.
        job_class: Of the jobs.
        left: Where groups are bound to lengths, gets what fits nowhere.
        now_ms: The clock of Redis.

    Returns:
        Prompt tokens given out, for each choice.
    """
    given = 0
    missed: list[WaitingJob] = []
    while packer.has_room(job_class):
        job = queue.pop()
        if job is None:
            break
        placed = packer.place(job)
        queue.settle(job, given=placed is not None)
        if placed is not None:
            given += job.prefill_tokens
            continue
        missed.append(job)
        if len(missed) in LOOK_AHEAD and all(
            map(packer.is_hopeless, queue.remaining())
        ):
            break
        waited_ms = now_ms - job.enqueued_ms
        if waited_ms >= RESERVE_AFTER_MS:
            # Smaller jobs must not take every block that is given back.
            packer.reserve(job, waited_ms)
    if missed and packer.bound:
        given += _spill(queue, packer, missed, left)
        left += (*missed, *queue.remaining())
    return given


def _spill(
    queue: FairQueue,
    packer: Packer,
    missed: list[WaitingJob],
    left: list[WaitingJob],
) -> int:
    """Lets jobs into idle groups of the other length class where none of it waits."""
    given = 0
    waiting = {packer.length(job) for job in (*left, *missed, *queue.remaining())}
    for job in missed:
        other = SHORT if packer.length(job) == LONG else LONG
        if other not in waiting and packer.place(job, spill=True):
            queue.charge(job)
            given += job.prefill_tokens
    return given


def _hold_ms(
    jobs: list[WaitingJob],
    snapshot: Snapshot,
    pool: PoolState,
    job_class: JobClass,
    now_ms: int,
) -> int | None:
    """Returns how long the class waits for a fuller batch, or None to go now.

    A group in mid-step takes nothing before the step ends, so waiting half a step
    costs little and spares it many small prefills. A group that is idle, a batch that
    cannot grow, or no arrivals to expect: no wait. Interactive jobs do not wait where
    only bulk runs.
    """
    behind_bulk = job_class is JobClass.INTERACTIVE and pool.all_bulk
    if not jobs or pool.idle or behind_bulk:
        return None
    window = min(snapshot.max_wait_ms, pool.open_step_ms / 2)
    waited = now_ms - min(job.enqueued_ms for job in jobs)
    expected = snapshot.arrivals_per_s * (window - waited) / 1000
    if waited >= window or expected < 1.0:
        return None
    choices = sum(job.choices for job in jobs)
    tokens = sum(job.prefill_tokens for job in jobs)
    if choices >= pool.slots or tokens >= pool.budget:
        return None
    return max(1, int(window - waited))
