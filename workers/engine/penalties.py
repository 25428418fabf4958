"""Repetition, presence and frequency penalties over one sequence's history."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class TokenHistory:
    """Which tokens a sequence has, and how often its output has each.

    Args:
        prompt: Prompt token ids.
    """

    __slots__ = ("_counts", "_seen")

    def __init__(self, prompt: Iterable[int]) -> None:
        self._seen: dict[int, None] = dict.fromkeys(prompt)
        self._counts: dict[int, int] = {}

    def record(self, token_id: int) -> None:
        """Takes an output token."""
        self._seen[token_id] = None
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def penalize(
        self,
        scores: "NDArray[np.float32]",
        *,
        repetition: float,
        presence: float,
        frequency: float,
    ) -> None:
        """Lowers the scores of tokens already there, in place.

        Args:
            scores: float32 [vocab_size].
            repetition: Divides positive scores and multiplies negative ones, for
                every token of prompt and output; 1 is none.
            presence: Subtracted once for every token of the output.
            frequency: Subtracted for every occurrence in the output.
        """
        if repetition != 1.0 and self._seen:
            ids = np.fromiter(self._seen, np.int64, len(self._seen))
            factor = np.float32(repetition)
            old = scores[ids]
            scores[ids] = np.where(old < 0, old * factor, old / factor)
        if (presence or frequency) and self._counts:
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(ids))
            scores[ids] -= np.float32(presence) + np.float32(frequency) * counts
