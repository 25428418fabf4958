"""How many prompt tokens a step may carry while others wait for their next token.

Every token of a prompt that runs beside decode rows delays theirs. Without a bound the
time between two tokens jumps from that of a decode step to that of a full chunk when a
prompt arrives. So two things are fitted while running: what a decode step takes by its
rows, and what a prompt token adds to a step by the keys that it attends to. From both
follows the chunk that keeps the step within its target.
"""

import math
from collections.abc import Iterable
from typing import Final

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


class Pace:
    """Bounds the prompt tokens of a step by the measured time of steps.

    The bound holds while interactive sequences decode. Bulk alone is not slowed down,
    nor is a prompt that runs by itself.

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
        self._prefill = StepTimeFit()
        """Milliseconds that a prompt token adds, by keys attended to."""

    def prefill_limit(self, running: Iterable[Sequence]) -> int | None:
        """Returns how many prompt tokens the next step may have; None is any number.

        Args:
            running: Sequences that may run, most urgent first.
        """
        decodes: list[Sequence] = []
        first: Sequence | None = None
        for sequence in running:
            if sequence.num_uncomputed == 1:
                decodes.append(sequence)
            elif first is None:
                first = sequence
        if first is None or self._target_ms == 0.0:
            return None
        if not any(sequence.is_interactive for sequence in decodes):
            return None
        if not self._decode.count:
            return None  # nothing is known to hold it against
        keys = sum(sequence.num_tokens for sequence in decodes)
        return self._fitting(self._decode_ms(len(decodes), keys), first.num_computed)

    def _decode_ms(self, rows: int, keys: int) -> float:
        """Returns what a step of these decode rows takes by itself.

        While a long prompt runs no such step is seen, and the rows' contexts grow.
        """
        grown = max(0, keys - self._decode_keys)
        return self._decode.predict(rows) + self._prefill.coefficients[1] * grown

    def _fitting(self, decode_ms: float, context: int) -> int:
        """Returns the largest chunk, after `context` tokens, that keeps the target."""
        target_ms = self._target_ms or GAP_RATIO * decode_ms
        room_ms = MARGIN * target_ms - decode_ms
        base, per_key = self._prefill.coefficients
        if room_ms <= 0.0 or base + per_key <= 0.0:
            return LEAST_CHUNK
        # n tokens attend to context + (n + 1) / 2 keys each: solve for n.
        linear = base + per_key * (context + 0.5)
        root = math.sqrt(linear * linear + 2.0 * per_key * room_ms)
        return max(LEAST_CHUNK, int(2.0 * room_ms / (linear + root)))

    def observe(self, ran: Plan, milliseconds: float) -> None:
        """Takes what one step ran and how long it took, before tokens are added."""
        prompts = [part for part in ran if part.length > 1 or not part.samples]
        rows = len(ran) - len(prompts)
        keys = sum(part.end for part in ran) - sum(part.end for part in prompts)
        if not prompts:
            self._decode.observe(rows, milliseconds)
            self._decode_keys = keys
            return
        decode_ms = self._decode_ms(rows, keys) if rows else 0.0
        tokens = sum(part.length for part in prompts)
        added_ms = max(0.0, milliseconds - decode_ms)
        self._prefill.observe(sum(map(_keys, prompts)) / tokens, added_ms / tokens)


def _keys(part: PlannedSlice) -> float:
    """Keys that a slice's tokens attend to, all together."""
    return part.length * (part.start + (part.length + 1) / 2)
