"""Chooses each row's next token.

Every row is worked on alone, so its token does not depend on the rows beside it, bit
for bit. Rows that want the plain maximum share one pass over all logits.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import structlog

from ...shared.errors import EngineError, NonFiniteLogits
from ...shared.messages import Sampling, TokenLogprob
from .logprobs import token_logprob
from .randomness import uniform
from .sampling_rows import SamplingRow

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

HEAD_SIZES: Final = (256, 4096)
"""Candidates looked at first for top-p: few tokens hold nearly all probability, and
sorting the whole vocabulary takes 15 times longer."""
RUN_LENGTH: Final = 512
"""Tokens summed at once when a token is drawn: about the vocabulary's square root."""

_log = structlog.get_logger(__name__)


class Sampled(msgspec.Struct, frozen=True):
    """A chosen token."""

    token_id: int
    logprob: TokenLogprob | None = None


SampleRows = Callable[
    ["torch.Tensor", Sequence[SamplingRow]], list["Sampled | EngineError"]
]
"""What `sample` is, and what may stand in its place."""


def sample(
    logits: "torch.Tensor", rows: Sequence[SamplingRow]
) -> list[Sampled | EngineError]:
    """Chooses a token for each row.

    Args:
        logits: float [num_rows, vocab_size], on any device.
        rows: One per row of logits.

    Returns:
        By row, the token, or the error that ends this row's request alone.
    """
    host = logits.detach().float().cpu().numpy()
    best = host.argmax(axis=1)
    highest, lowest = host[np.arange(len(best)), best], host.min(axis=1)
    finite = np.isfinite(highest) & np.isfinite(lowest)
    return [
        _sample_safely(host[index], row, int(best[index]))
        if finite[index]
        else _non_finite(host[index])
        for index, row in enumerate(rows)
    ]


def _sample_safely(
    logits: "NDArray[np.float32]", row: SamplingRow, best: int
) -> Sampled | EngineError:
    """Samples one row; whatever goes wrong there must not end its neighbours."""
    try:
        with np.errstate(over="ignore"):  # an infinite score is named as an error
            return _sample_row(logits, row, best)
    except Exception as error:  # noqa: BLE001 - ends this row's request alone
        _log.exception("sampling_failed", position=row.num_output)
        return EngineError(f"the next token could not be drawn: {error!r}")


def _non_finite(logits: "NDArray[np.float32]") -> NonFiniteLogits:
    wrong = int(np.count_nonzero(~np.isfinite(logits)))
    return NonFiniteLogits(
        f"{wrong} of {logits.size} logits of this request are NaN or infinite; check "
        "the model's weights and its data type"
    )


def _sample_row(
    logits: "NDArray[np.float32]", row: SamplingRow, best: int
) -> Sampled | EngineError:
    token_id = best
    if not row.is_plain_argmax:
        scores = row.scores(logits)
        token_id = int(scores.argmax())
        if not np.isfinite(scores[token_id]):
            return _no_best(scores, float(scores[token_id]))
        if not row.is_greedy:
            number = uniform(row.seed, row.choice, row.num_output)
            token_id = _draw(scores, row.sampling, number)
    if row.sampling.logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, token_logprob(logits, token_id, row.sampling.logprobs))


def _no_best(scores: "NDArray[np.float32]", highest: float) -> EngineError:
    """Says why no token can be chosen: all are forbidden, or a score overflowed."""
    if highest == -np.inf and np.isneginf(scores).all():
        return EngineError(
            "min_tokens forbids every token here because stop_token_ids names "
            "the whole vocabulary; name fewer ids or lower min_tokens"
        )
    return EngineError(
        f"the penalties and logit_bias of this request raise a score to {highest}, "
        "beyond float32; use a repetition_penalty nearer to 1 and smaller biases"
    )


def _draw(scores: "NDArray[np.float32]", sampling: Sampling, number: float) -> int:
    """Draws by inverse transform among the tokens that the filters leave.

    Temperature, then top-k, then top-p, then min-p, as in transformers. Each leaves
    the most likely so many, so together they are one prefix of the sorted tokens.

    Args:
        scores: float32 [vocab_size].
        sampling: Temperature not below `GREEDY_BELOW`, and filters.
        number: In [0, 1).
    """
    weights = np.exp((scores - scores.max()) / np.float32(sampling.temperature))
    ids = _candidates(scores, weights, sampling)
    if ids is None:
        return _pick(weights, number)
    kept = weights[ids].astype(np.float64)
    return int(ids[_pick(kept[: _prefix(kept, weights, sampling)], number)])


def _pick(weights: "NDArray[np.floating]", number: float) -> int:
    """Returns the first index whose running sum exceeds `number` of the whole.

    Sums runs of the vocabulary first and looks inside one of them: a running sum over
    everything takes three times as long as all the rest.

    Args:
        weights: Not negative, some of them positive.
        number: In [0, 1).
    """
    runs = np.add.reduceat(
        weights, np.arange(0, weights.size, RUN_LENGTH), dtype=np.float64
    )
    upto = np.cumsum(runs)
    # The product may round up to the whole, which no running sum exceeds.
    target = min(number * upto[-1], np.nextafter(upto[-1], 0.0))
    run = int(np.searchsorted(upto, target, side="right"))
    inside = weights[run * RUN_LENGTH : (run + 1) * RUN_LENGTH]
    within = np.cumsum(inside, dtype=np.float64)
    index = int(np.searchsorted(within, target - (upto[run] - runs[run]), side="right"))
    if index == len(inside):
        # The two sums differ in their last bits; a weight of 0 is never chosen.
        index = int(np.flatnonzero(inside)[-1])
    return run * RUN_LENGTH + index


def _candidates(
    scores: "NDArray[np.float32]", weights: "NDArray[np.float32]", sampling: Sampling
) -> "NDArray[np.int64] | None":
    """Ids by falling score, at least as many as the filters leave; None is all."""
    top_k = sampling.top_k
    if top_k is not None and top_k < scores.size:
        return _sorted_head(scores, top_k)
    if sampling.top_p < 1.0:
        total = float(np.sum(weights, dtype=np.float64))
        for size in HEAD_SIZES:
            if size >= scores.size:
                break
            ids = _sorted_head(scores, size)
            if float(np.sum(weights[ids], dtype=np.float64)) >= sampling.top_p * total:
                return ids
        return _sorted_head(scores, scores.size)
    if sampling.min_p > 0.0:
        return _by_score(scores, np.flatnonzero(weights >= sampling.min_p))
    return None


def _sorted_head(scores: "NDArray[np.float32]", size: int) -> "NDArray[np.int64]":
    """Ids of the `size` highest scores, and of those equal to the last."""
    if size >= scores.size:
        return _by_score(scores, np.arange(scores.size))
    least = np.partition(scores, scores.size - size)[scores.size - size]
    return _by_score(scores, np.flatnonzero(scores >= least))


def _by_score(
    scores: "NDArray[np.float32]", ids: "NDArray[np.int64]"
) -> "NDArray[np.int64]":
    """Sorts ids by falling score; equal ones by id."""
    order: NDArray[np.int64] = np.argsort(-scores[ids], kind="stable")
    return ids[order]


def _prefix(
    kept: "NDArray[np.float64]", weights: "NDArray[np.float32]", sampling: Sampling
) -> int:
    """How many of the sorted candidates top-p and min-p leave, at least one."""
    count = len(kept)
    if sampling.top_p < 1.0:
        if sampling.top_k is not None and sampling.top_k < len(weights):
            total = float(kept.sum())
        else:
            total = float(np.sum(weights, dtype=np.float64))
        reached = np.searchsorted(np.cumsum(kept), sampling.top_p * total)
        count = min(count, int(reached) + 1)
    if sampling.min_p > 0.0:
        # The most likely token's weight is 1.
        count = min(count, int(np.count_nonzero(kept >= sampling.min_p)))
    return max(1, count)
