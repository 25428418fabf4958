"""What is left of each group while a plan is made. Pure."""

from collections.abc import Sequence
from typing import Final

from ..shared.keys import BEYOND
from ..shared.messages import JobClass
from .snapshot import Assignment, GroupView, WaitingJob

SPILL_LOAD: Final = 0.25
"""A group bound to the other length class takes a job only while less than this part
of it is in use."""
HEADROOM: Final = 16
"""Where interactive jobs run, bulk leaves one part in this many free for the next."""
SHORT: Final = "short"
LONG: Final = "long"


def length_of(bucket: str, short_tokens: int) -> str:
    """Returns the length class of a bucket.

    Args:
        bucket: Its upper bound in tokens, or `beyond`.
        short_tokens: Buckets up to this bound are short.
    """
    return LONG if bucket == BEYOND or int(bucket) > short_tokens else SHORT


def load_of(view: GroupView, blocks: int, running: int, tokens: int) -> float:
    """Returns the fullest of a group's three resources, from what is left of each."""
    return 1.0 - min(
        blocks / view.total_blocks,
        running / view.max_running,
        tokens / view.batch_tokens,
    )


class Room:
    """One group and what this plan has left of it.

    Args:
        view: The group.
        lends: Whether interactive jobs may take what its bulk holds; False while
            its bulk has a turn.
    """

    __slots__ = (
        "blocks",
        "bulk_blocks",
        "bulk_running",
        "bulk_tokens",
        "closed",
        "lends",
        "lent",
        "reserved",
        "running",
        "tokens",
        "view",
    )

    def __init__(self, view: GroupView, *, lends: bool = True) -> None:
        self.view = view
        self.blocks = view.free_blocks
        self.running = view.free_running
        self.tokens = view.free_tokens
        self.bulk_blocks = view.bulk_blocks
        self.bulk_running = view.bulk_running
        self.bulk_tokens = view.bulk_tokens
        self.lends = lends
        self.closed = bool(view.alone)
        """It runs one job alone."""
        self.reserved = False
        """It is kept free for a job that does not fit yet."""
        self.lent = False
        """That job is interactive: bulk may fill what it waits for, since it is pushed
        out at once."""

    @property
    def load(self) -> float:
        """The fullest of its three resources, 0 (empty) to 1 (full) and, where
        interactive jobs have pushed bulk out, beyond.
        """
        return load_of(self.view, self.blocks, self.running, self.tokens)

    @property
    def empty(self) -> bool:
        """Whether nothing is promised to it, this plan included."""
        return self.running >= self.view.max_running

    @property
    def exhausted(self) -> bool:
        """Whether not even the smallest interactive job fits."""
        if self.closed or (self.reserved and not self.lent):
            return True
        if self.lends:
            return (
                self.running + self.bulk_running <= 0
                or self.tokens + self.bulk_tokens <= 0
                or self.blocks + self.bulk_blocks <= 0
            )
        return self.running <= 0 or self.tokens <= 0 or self.blocks <= 0

    @property
    def open_to_bulk(self) -> bool:
        """Whether the smallest bulk job may fit."""
        slots, blocks = self._headroom()
        return self.running > slots and self.blocks > blocks and self.tokens > 0

    def _headroom(self) -> tuple[int, int]:
        """Slots and blocks that bulk leaves to the next interactive jobs.

        Without it each of them would have to push bulk out, whose prompt is then
        computed again. Where no interactive job runs, bulk takes all.
        """
        view = self.view
        if self.running + self.bulk_running >= view.max_running:
            return 0, 0
        slots = max(view.max_running // HEADROOM, view.max_running >= 4)
        return slots, view.total_blocks // HEADROOM

    def fits(self, job: WaitingJob) -> bool:
        """Whether the job can go now."""
        view = self.view
        bulk = job.job_class is JobClass.BULK
        if self.closed or not view.could_hold(job):
            return False
        if self.reserved and not (self.lent and bulk):
            return False
        if job.alone:
            return self.empty and self.blocks >= view.cost_blocks(job)
        blocks, running, tokens = self.blocks, self.running, self.tokens
        if bulk:
            slots_kept, blocks_kept = self._headroom()
            running, blocks = running - slots_kept, blocks - blocks_kept
        elif self.lends:
            blocks += self.bulk_blocks
            running += self.bulk_running
            tokens += self.bulk_tokens
        if running < 1 or view.cost_blocks(job) > blocks:
            return False
        # More choices than the group runs at once go when it is empty, and a prefill
        # larger than the whole budget when no other is going on.
        return _within(job.choices, running, view.max_running) and _within(
            job.prefill_tokens, tokens, view.batch_tokens
        )

    def takes_from_bulk(self, job: WaitingJob) -> bool:
        """Whether a job that fits would push bulk out."""
        tokens = min(job.prefill_tokens, self.view.batch_tokens)
        return (
            self.running < min(job.choices, self.view.max_running)
            or self.blocks < self.view.cost_blocks(job)
            or self.tokens < tokens
        )

    def is_short(self, job: WaitingJob) -> bool:
        """Whether blocks are missing, or slots for several choices.

        One slot and prefill credit come back by themselves, and the first in order gets
        them; what a large job needs would be taken bit by bit.
        """
        blocks, running = self.blocks, self.running
        if self.lends and job.job_class is JobClass.INTERACTIVE:
            blocks, running = blocks + self.bulk_blocks, running + self.bulk_running
        slots = _within(job.choices, running, self.view.max_running)
        return self.view.cost_blocks(job) > blocks or (job.choices > 1 and not slots)

    def take(self, job: WaitingJob) -> Assignment:
        """Books the job."""
        cost = self.view.cost_blocks(job)
        self.blocks -= cost
        self.running -= job.choices
        self.tokens -= job.prefill_tokens
        if job.job_class is JobClass.BULK:
            self.bulk_blocks += cost
            self.bulk_running += job.choices
            self.bulk_tokens += job.prefill_tokens
        self.closed = job.alone
        return Assignment(job.id, job.tokens, cost, job.choices, job.alone)


def _within(need: int, left: int, whole: int) -> bool:
    """Whether a need fits; one above the whole fits when all of it is left."""
    return need <= left or need > whole <= left


def _sure_tokens(view: GroupView) -> int:
    return min(view.total_blocks * view.block_size, view.max_context)


class Shapes:
    """The distinct sizes of the live groups: what could hold a job at all.

    Args:
        groups: The live groups.
    """

    def __init__(self, groups: Sequence[GroupView]) -> None:
        found: dict[tuple[object, ...], GroupView] = {}
        for g in groups:
            size = (g.total_blocks, g.max_context, g.schema, g.serves, g.block_size)
            key = (*size, g.version, g.weights, g.tokenizer)
            if key not in found or found[key].alone:
                found[key] = g
        self._all = tuple(found.values())
        self._open = tuple(view for view in self._all if not view.alone)
        self._bound = any(view.serves != "any" for view in self._all)
        none: frozenset[str] = frozenset()
        self.offered = none.union(*(view.offers for view in self._all))
        """Needs of jobs that some live group satisfies."""
        self.sure_tokens = min(map(_sure_tokens, self._all), default=0)
        """Prompt and output of one choice that every live group could hold."""

    def could_hold(self, job: WaitingJob) -> bool:
        """Whether the job may go to some live group that could hold it."""
        return any(view.could_hold(job) for view in self._all)

    def impossible(self, job: WaitingJob) -> bool:
        """Whether groups that the job may go to are alive and all too small."""
        if not self._all or self.could_hold(job):
            return False
        return any(view.schema >= job.schema and view.admits(job) for view in self._all)

    def has_home(self, job: WaitingJob, length: str) -> bool:
        """Whether a group of the job's length class, or of any, could hold it."""
        if not self._bound:
            return True
        return any(
            view.serves in ("any", length) and view.could_hold(job)
            for view in self._open
        )


class PoolState:
    """The pool in a few figures, from one look at every group.

    Args:
        groups: The live groups.
    """

    def __init__(self, groups: Sequence[GroupView]) -> None:
        self.idle = self.all_bulk = False
        """Whether some group has nothing to do; nothing but bulk."""
        self.slots = self.budget = 0
        """Free slots and prefill tokens of the groups with a free slot."""
        slowest = float("inf")
        open_step = measured = slowest
        for view in groups:
            step, free = view.step_ms, view.free_running
            if 0 < step < measured:
                measured = step
            if free <= 0 or view.alone:
                continue
            if free >= view.max_running:
                self.idle = True
            if free + view.bulk_running >= view.max_running:
                self.all_bulk = True
            if step < open_step:
                open_step = step
            self.slots += free
            self.budget += view.free_tokens
        self.open_step_ms = open_step
        """Of the quickest group with a free slot; infinite without one."""
        self.step_ms = 0.0 if measured == slowest else measured
        """Of the quickest group whose steps were measured; 0 without one."""
