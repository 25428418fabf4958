"""Blocks for a step: when they run out, the least urgent sequences yield theirs.

Bulk yields to interactive, never the other way round; within a class the lower
priority yields, then whoever came last. The most urgent sequence never yields and may
take all blocks, which suffice for it alone (`check_request`). So it ends, and then the
next is the most urgent.
"""

from .planner import Plan, PlannedSlice
from .roster import Roster
from .sequence import Sequence


def make_room(plan: Plan, roster: Roster) -> Plan:
    """Gives the slices of a plan their blocks, the most urgent first.

    Args:
        plan: Slices of running sequences.
        roster: Holds them; who has to yield waits there afterwards.

    Returns:
        What can run, in the plan's order: a slice without room is left out or
        shortened, one whose sequence yielded is gone. Nothing, where the plan lacks the
        most urgent (a step ran out of memory) and all in it stand still: the next has
        it again.
    """
    if roster.provide_all(plan):
        return plan
    provided: dict[int, PlannedSlice] = {}
    for part in sorted(plan, key=lambda one: one.sequence.urgency):
        if part.sequence.allocation is None:
            continue  # it has yielded to a more urgent one
        while not roster.fits(part):
            victim = _least_urgent_holder(roster, part.sequence)
            if victim is None:
                break
            roster.preempt(victim, part.sequence)
        granted = roster.provide(part)
        if granted is not None:
            provided[id(part.sequence)] = granted
    return tuple(
        provided[id(part.sequence)] for part in plan if id(part.sequence) in provided
    )


def _least_urgent_holder(roster: Roster, asking: Sequence) -> Sequence | None:
    """Returns the least urgent sequence with blocks, if it is below `asking`."""
    for sequence in reversed(roster.running):
        if sequence is asking:
            return None
        if sequence.allocation is not None and sequence.allocation.blocks:
            return sequence
    return None
