"""What the sampler needs to know of one row of logits."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from ...shared.messages import Sampling
from .penalties import TokenHistory

if TYPE_CHECKING:
    from numpy.typing import NDArray

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy. There the last bit of a logit decides between
the most likely tokens, and far below, the temperature is 0 in float32."""


class SamplingRow:
    """Sampling state of one choice; its sequence records every output token here.

    Args:
        sampling: The request's parameters.
        seed: With choice and position it keys the row's random number.
        choice: Index of the choice.
        prompt: Prompt token ids.
        stop_ids: Ids that end the output, end-of-sequence ids included; masked
            before min_tokens.
    """

    __slots__ = (
        "_bias_ids",
        "_bias_values",
        "_history",
        "_stop_ids",
        "_untouched",
        "choice",
        "num_output",
        "sampling",
        "seed",
    )

    def __init__(
        self,
        sampling: Sampling,
        *,
        seed: int,
        choice: int,
        prompt: Iterable[int],
        stop_ids: frozenset[int],
    ) -> None:
        self.sampling = sampling
        self.seed = seed
        self.choice = choice
        self.num_output = 0
        """Output tokens so far: the position of the next one."""
        penalized = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        self._history = TokenHistory(prompt) if penalized else None
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self._bias_ids = np.array(list(sampling.logit_bias), np.int64)
        self._bias_values = np.array(list(sampling.logit_bias.values()), np.float32)
        self._untouched = not penalized and not sampling.logit_bias

    def record(self, token_id: int) -> None:
        """Takes an output token."""
        self.num_output += 1
        if self._history is not None:
            self._history.record(token_id)

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be a stop token."""
        return self.num_output >= self.sampling.min_tokens

    @property
    def is_greedy(self) -> bool:
        """Whether the highest score is taken and nothing is drawn."""
        return self.sampling.temperature < GREEDY_BELOW

    @property
    def is_plain_argmax(self) -> bool:
        """Whether the row's next token is the largest of its raw logits."""
        return (
            self.is_greedy
            and self._untouched
            and (self.may_stop or not self._stop_ids.size)
        )

    def scores(self, logits: "NDArray[np.float32]") -> "NDArray[np.float32]":
        """Applies penalties, then bias, then the mask of min_tokens.

        Args:
            logits: float32 [vocab_size], left as it is.

        Returns:
            float32 [vocab_size]; minus infinity where a token is not allowed.
        """
        masked = not self.may_stop and self._stop_ids.size
        if self._untouched and not masked:
            return logits
        scores = logits.copy()
        if self._history is not None:
            self._history.penalize(
                scores,
                repetition=self.sampling.repetition_penalty,
                presence=self.sampling.presence_penalty,
                frequency=self.sampling.frequency_penalty,
            )
        if self._bias_ids.size:
            scores[self._bias_ids] += self._bias_values
        if masked:
            scores[self._stop_ids] = -np.inf
        return scores
