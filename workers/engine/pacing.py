"""How many prompt tokens a step may carry while others wait for their next token.

Every token of a prompt that runs beside decode rows delays theirs. Without a bound the
time between two tokens jumps from that of a decode step to that of a full chunk when a
prompt arrives. So two things are fitted while running: what a decode step takes by its
rows, and what prompt tokens add to it: a fixed part, a part by tokens, and one by the
keys that these attend to. From both follows the chunk that keeps the step within its
target.
"""

import math
from collections.abc import Iterable
from typing import Final

from .added_time import AddedTimeFit
from .planner import Plan, PlannedSlice
from .sequence import Sequence
from .step_time import StepTimeFit

GAP_RATIO: Final = 2.0
"""Without a setting, steps with prompt tokens take at most this many times a decode
step's time..."""
MARGIN: Final = 0.8
"""...less a margin, since single steps scatter around the fit."""
LEAST_CHUNK: Final = 2
"""Prompt tokens that a step always has room for: prefill never stands still."""
FIRST_CHUNK: Final = 8
"""With nothing known, this many or one for each decode row: a row costs its weights'
reading too, so a prompt token costs no more than it."""
FLOOR_CHUNK: Final = 64
"""Where prompt tokens cost a fixed part that leaves no room, chunks grow until their
tokens take as long as it, up to this many: smaller ones pay it more often and slow the
rows down in more steps."""
EXPLORE_EVERY: Final = 8
"""One bounded step in so many has another chunk: with all of one size the fixed part
and that by tokens could not be told apart, and a wrong fit would stay."""
BULK_STEP_MS: Final = 150.0
"""Time of a step with bulk prompts where nobody waits: who arrives waits for its end,
and shorter steps would cost bulk more than a few per cent of its rate."""
LEAST_BULK_CHUNK: Final = 32
"""Bulk prompt tokens of a step at least: fewer rows use the processor badly."""
BULK_WORTH: Final = 4.0
"""They take at least this many times what the step costs without them, so that on a
slow model that cost takes a fifth of the time at most."""
EXPLORE_MARGIN: Final = 0.88
"""In turn it has half a chunk or a larger one, which takes part of the margin."""


class Pace:
    """Bounds the prompt tokens of a step by the measured time of steps.

    The bound holds while interactive sequences decode. An interactive prompt that runs
    by itself is not slowed down; bulk prompts run in steps short enough that whoever
    arrives meanwhile does not wait long.

    Args:
        target_ms: Time that a step may take; None is twice that of a decode step, 0 is
            no bound.
    """

    def __init__(self, target_ms: float | None) -> None:
        self._target_ms = target_ms
        self._decode = StepTimeFit()
        """Milliseconds of steps without prompt tokens, by rows."""
        self._decode_keys = 0
        """Keys that the last of these steps attended to."""
        self._added = AddedTimeFit()
        self._bulk = StepTimeFit()
        """Milliseconds of steps with prompt tokens, by these."""
        self._bulk_tokens = 0
        """Prompt tokens of the last of them."""
        self._bulk_bounded = 0
        self._bounded = 0
        """Steps with prompt tokens that were bounded."""

    def prefill_limit(self, running: Iterable[Sequence]) -> int | None:
        """Returns how many prompt tokens the next step may have; None is any number.

        Args:
            running: Sequences that may run, most urgent first.
        """
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in running:
            (decodes if sequence.num_uncomputed == 1 else prompts).append(sequence)
        if not prompts or self._target_ms == 0.0:
            return None
        first = prompts[0]
        if not any(sequence.is_interactive for sequence in decodes):
            return self._bulk_limit(prompts)
        if not self._decode.count:
            return None  # nothing is known to hold it against
        self._bounded += 1
        explores = self._bounded % EXPLORE_EVERY == 0
        larger = explores and self._bounded // EXPLORE_EVERY % 2 == 1
        rows = len(decodes)
        largest = self._added.largest
        # No further than twice what has been measured.
        chunk = max(FIRST_CHUNK, rows, 2.0 * largest)
        if largest:
            keys = sum(sequence.num_tokens for sequence in decodes)
            decode_ms = self._decode_ms(rows, keys)
            margin = EXPLORE_MARGIN if larger else MARGIN
            fitting = self._fitting(decode_ms, first.num_computed, margin)
            chunk = min(chunk, fitting)
        if explores and not larger:
            chunk /= 2.0
        return max(LEAST_CHUNK * 2 if larger else LEAST_CHUNK, int(chunk))

    def _bulk_limit(self, prompts: list[Sequence]) -> int | None:
        """Bulk prompts beside nobody who waits: their step ends before long.

        An interactive prompt in it is not held up, and bulk only fills what is left.
        """
        if not self._bulk.count or all(one.is_interactive for one in prompts):
            return None
        waited = sum(one.num_uncomputed for one in prompts if one.is_interactive)
        self._bulk_bounded += 1
        base, slope = self._bulk.coefficients
        chunk = self._bulk_tokens / 2.0  # another size tells what a token costs
        if slope > 0.0:
            chunk = max(BULK_STEP_MS - base, BULK_WORTH * base) / slope
            if self._bulk_bounded % EXPLORE_EVERY == 0:
                chunk /= 2.0
        return max(waited, LEAST_BULK_CHUNK, int(chunk))

    def _decode_ms(self, rows: int, keys: int) -> float:
        """Returns what a step of these decode rows takes by itself.

        While a long prompt runs no such step is seen, and the rows' contexts grow: by
        that, time grows in proportion at most, whatever a key is taken to cost.
        """
        decode_ms = self._decode.predict(rows)
        grown = max(0, keys - self._decode_keys)
        _, _, per_key = self._added.coefficients
        return decode_ms + min(per_key, decode_ms / max(1, self._decode_keys)) * grown

    def _fitting(self, decode_ms: float, context: int, margin: float) -> float:
        """Returns the largest chunk, after `context` tokens, that keeps the target."""
        target_ms = self._target_ms or GAP_RATIO * decode_ms
        room_ms = margin * target_ms - decode_ms
        fixed, per_token, per_key = self._added.coefficients
        linear = per_token + per_key * (context + 0.5)
        chunk = _tokens_within(room_ms - fixed, linear, per_key)
        # The floor takes the margin where that is enough, else what it needs.
        spare_ms = target_ms - decode_ms - fixed if fixed < room_ms else fixed
        floor = _tokens_within(min(fixed, spare_ms), linear, per_key)
        return max(chunk, min(floor, FLOOR_CHUNK))

    def observe(self, ran: Plan, milliseconds: float) -> None:
        """Takes what one step ran and how long it took, before tokens are added."""
        prompts = [part for part in ran if part.length > 1 or not part.samples]
        rows = len(ran) - len(prompts)
        keys = sum(part.end for part in ran) - sum(part.end for part in prompts)
        if not prompts:
            self._decode.observe(rows, milliseconds)
            self._decode_keys = keys
            return
        self._bulk_tokens = sum(part.length for part in prompts)
        self._bulk.observe(self._bulk_tokens, milliseconds)
        if not rows or not self._decode.count:
            return  # prompts by themselves do not tell what they add to a decode step
        decode_ms = self._decode_ms(rows, keys)
        self._added.observe(
            sum(part.length for part in prompts),
            sum(map(_keys, prompts)),
            max(0.0, milliseconds - decode_ms),
            decode_ms,
        )


def _tokens_within(room_ms: float, linear: float, per_key: float) -> float:
    """Returns n with linear * n + per_key * n * n / 2 = room: each of n tokens attends
    to the keys of those before it too.
    """
    if room_ms <= 0.0:
        return 0.0
    root = math.sqrt(linear * linear + 2.0 * per_key * room_ms)
    return 2.0 * room_ms / (linear + root) if linear + root > 0.0 else math.inf


def _keys(part: PlannedSlice) -> float:
    """Keys that a slice's tokens attend to, all together."""
    return part.length * (part.start + (part.length + 1) / 2)
