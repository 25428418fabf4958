"""Log probabilities of one row."""

from typing import TYPE_CHECKING

import numpy as np

from ...shared.messages import TokenLogprob

if TYPE_CHECKING:
    from numpy.typing import NDArray


def token_logprob(
    logits: "NDArray[np.float32]", token_id: int, num_top: int
) -> TokenLogprob:
    """Returns the log-softmax of raw logits at the chosen token and at the top.

    Args:
        logits: float32 [vocab_size], finite, before penalties and temperature.
        token_id: The chosen token.
        num_top: How many of the most likely tokens to list, 0 to 20.
    """
    peak = logits.max()
    total = float(np.sum(np.exp(logits - peak), dtype=np.float64))
    normalizer = float(peak) + float(np.log(total))
    top: tuple[tuple[int, float], ...] = ()
    if num_top := min(num_top, logits.size):
        least = np.partition(logits, logits.size - num_top)[logits.size - num_top]
        # By value, so that equal logits are listed in the order of their ids.
        ids = np.flatnonzero(logits >= least)
        ids = ids[np.argsort(-logits[ids], kind="stable")][:num_top]
        top = tuple((int(i), float(logits[i]) - normalizer) for i in ids)
    return TokenLogprob(float(logits[token_id]) - normalizer, top)
