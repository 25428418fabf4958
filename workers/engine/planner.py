"""Which tokens run in the next step. Pure: sequences in, packed batch out."""

from collections.abc import Iterable

import msgspec
import numpy as np

from ...shared.errors import EngineError
from .batch import SequenceSlice, StepBatch
from .bulk_share import BulkShare
from .sequence import Sequence


class PlannedSlice(msgspec.Struct, frozen=True):
    """Tokens `start` to `start + length - 1` of one sequence."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        """The sequence's context length once this slice has run."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether the slice reaches the sequence's last token, so the next is drawn."""
        return self.end == self.sequence.num_tokens


Plan = tuple[PlannedSlice, ...]


def plan_step(
    running: Iterable[Sequence],
    token_budget: int,
    prefill_limit: int | None = None,
    share: BulkShare | None = None,
) -> Plan:
    """Plans one step: every decode row, then prefill chunks in order of urgency, bulk
    with what interactive prompts leave, and its share at least.

    Args:
        running: Sequences that may run, most urgent first.
        token_budget: Tokens in the step; prefill gets at least one, so that many
            decode rows cannot starve it.
        prefill_limit: Prefill tokens at most, to bound the step's time.
        share: Deals bulk prompts their share; None gives them none.

    Returns:
        Slices in the order in which they are packed.
    """
    decodes: list[PlannedSlice] = []
    prefills: list[Sequence] = []
    for sequence in running:
        if sequence.num_uncomputed == 1:
            decodes.append(PlannedSlice(sequence, sequence.num_computed, 1))
        else:
            prefills.append(sequence)
    # Also where a step without memory has left bulk in front.
    prefills.sort(key=lambda sequence: not sequence.is_interactive)
    room = max(1, token_budget - len(decodes))
    if prefill_limit is not None:
        room = min(room, max(1, prefill_limit))
    kept, owner = 0, None
    if share is not None and prefills and prefills[0].is_interactive:
        owner = _oldest_bulk(prefills)
        kept = 0 if owner is None else share.of(room)
    # The first never waits for bulk: where there is room for one token, it has it.
    room = max(room, kept + 1)
    return (*decodes, *_plan_prefills(prefills, room, kept, owner))


def _oldest_bulk(prefills: Iterable[Sequence]) -> Sequence | None:
    """Returns the bulk prompt that came first, whatever its priority."""
    return min(
        (one for one in prefills if not one.is_interactive),
        key=lambda one: (one.arrival, one.choice),
        default=None,
    )


def _plan_prefills(
    prefills: Iterable[Sequence], room: int, kept: int, owner: Sequence | None
) -> Iterable[PlannedSlice]:
    """Fills `room` tokens, of which `kept` are for `owner` alone.

    A prompt waits while one before it computes the same block: it will find it in the
    cache. The first never waits, so something always moves.
    """
    coming: set[int] = set()
    for sequence in prefills:
        if sequence is owner:
            kept = 0
        length = min(room - kept, sequence.num_uncomputed)
        if length == 0:
            continue
        chain, computed = sequence.prompt_chain, sequence.num_computed
        if chain is not None:
            if chain.next_name(computed, sequence.num_tokens) in coming:
                continue
            coming.update(chain.pending_names(computed))
        yield PlannedSlice(sequence, computed, length)
        room -= length
        if room == 0:
            break


def left_first(running: Iterable[Sequence], left: Iterable[Sequence]) -> list[Sequence]:
    """Returns `running` with those in front that the last step left out, in order."""
    rank = {id(sequence): index for index, sequence in enumerate(left)}
    return sorted(running, key=lambda sequence: rank.get(id(sequence), len(rank)))


def left_parts_first(plan: Plan, left: Iterable[Sequence]) -> Plan:
    """Returns a plan of which only the beginning can run, in fair order: what the last
    step left out, then the rest, in each part bulk last. So no prompt waits for long
    behind decode rows, nor they behind it. Prompts of bulk come last in any case.
    """
    waited = {id(sequence) for sequence in left}

    def rank(part: PlannedSlice) -> tuple[bool, bool]:
        is_bulk = not part.sequence.is_interactive
        may_wait = is_bulk and part.length > 1
        return may_wait or id(part.sequence) not in waited, is_bulk

    return tuple(sorted(plan, key=rank))


def cut(plan: Plan, num_tokens: int) -> Plan:
    """Returns the beginning of a plan.

    Args:
        plan: A plan.
        num_tokens: Tokens at most, at least one.
    """
    kept: list[PlannedSlice] = []
    for part in plan:
        length = min(part.length, num_tokens)
        if length == 0:
            break
        kept.append(PlannedSlice(part.sequence, part.start, length))
        num_tokens -= length
    return tuple(kept)


def halve(plan: Plan) -> Plan:
    """Returns the first half of a plan, or of its only slice.

    Args:
        plan: More than one slice, or one of more than one token.
    """
    if len(plan) > 1:
        return plan[: len(plan) // 2]
    only = plan[0]
    return (PlannedSlice(only.sequence, only.start, only.length // 2),)


def num_tokens(plan: Plan) -> int:
    """Returns how many tokens a plan runs."""
    return sum(part.length for part in plan)


def pack(plan: Plan) -> StepBatch:
    """Packs a plan's tokens, without padding, for the model runner.

    Raises:
        EngineError: A sequence has no KV reservation.
    """
    total = num_tokens(plan)
    token_ids = np.empty(total, np.int64)
    positions = np.empty(total, np.int64)
    slices: list[SequenceSlice] = []
    logit_rows: list[int] = []
    adapters = tuple(part.sequence.request.adapter for part in plan)
    at = 0
    for part in plan:
        sequence = part.sequence
        if sequence.allocation is None:
            raise EngineError(f"request {sequence.request.id} runs without KV blocks")
        token_ids[at : at + part.length] = sequence.token_ids[part.start : part.end]
        positions[at : at + part.length] = np.arange(part.start, part.end)
        slices.append(
            SequenceSlice(
                query_start=at,
                query_length=part.length,
                context_length=part.end,
                block_table=sequence.allocation.table(part.end),
                prompt_length=sequence.num_prompt,
            )
        )
        at += part.length
        if part.samples:
            logit_rows.append(at - 1)
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        slices=tuple(slices),
        logit_rows=np.array(logit_rows, np.int64),
        adapters=adapters if any(adapters) else (),
    )
