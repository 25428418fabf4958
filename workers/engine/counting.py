"""An engine's room and counters as one value."""

from .kv.manager import KVManager
from .request import Capacity
from .roster import Roster


class StepCount:
    """Steps that ran, and the tokens in them."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0

    def add(self, tokens: int) -> None:
        """Counts a step of so many tokens."""
        self.steps += 1
        self.tokens += tokens


def capacity_of(
    kv: KVManager,
    roster: Roster,
    *,
    max_running: int,
    out_of_memory: int,
    count: StepCount,
    step_fit_ms: tuple[float, float],
) -> Capacity:
    """Returns room and counters.

    Args:
        kv: The KV pool.
        roster: Who is here.
        max_running: Sequences in a step at most.
        out_of_memory: Times a step did not fit in memory.
        count: Of the steps so far.
        step_fit_ms: Step time as a + b * tokens, in milliseconds.
    """
    return Capacity(
        total_blocks=kv.total_blocks,
        free_blocks=kv.free_blocks,
        cached_blocks=kv.cached_blocks,
        allocated_tokens=kv.held_tokens,
        used_tokens=kv.held_tokens - roster.empty_slots,
        max_running=max_running,
        num_running=len(roster.running) + len(roster.waiting),
        prefill_backlog=roster.prefill_backlog,
        overruns=roster.overruns,
        preemptions=roster.preemptions,
        prefix_tokens_asked=roster.tokens_asked,
        prefix_tokens_hit=roster.tokens_hit,
        out_of_memory=out_of_memory,
        steps=count.steps,
        scheduled_tokens=count.tokens,
        step_fit_ms=step_fit_ms,
    )
