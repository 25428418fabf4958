"""How well a model foretells a text: the loss of each of its tokens."""

from typing import TYPE_CHECKING, Final

from ..shared.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from .engine.batch import ModelRunner, StepBatch

ROWS: Final = 32
"""Tokens of one step: float64 logits of a large vocabulary take a megabyte each."""


def token_losses(runner: "ModelRunner", token_ids: "Sequence[int]") -> list[float]:
    """Runs a text through the model as a prefill and reads every row's logits.

    It writes into the first KV blocks, so nobody may own any.

    Args:
        runner: The model.
        token_ids: The text, at least two tokens.

    Returns:
        -ln p of each token but the first, float64.

    Raises:
        InvalidRequest: The text is too short or too long for the model.
    """
    import numpy as np
    import torch

    length = len(token_ids)
    longest = min(runner.max_context, runner.num_blocks * runner.block_size)
    if not 2 <= length <= longest:
        raise InvalidRequest(
            "text", f"has {length} tokens; expected 2 to {longest}, the model's context"
        )
    ids = np.asarray(token_ids, dtype=np.int64)
    losses: list[float] = []
    for start in range(0, length, ROWS):
        batch = _step(ids, start, runner.block_size)
        rows = len(batch.logit_rows)
        logits = runner.run(batch)[:rows].double()
        wanted = torch.from_numpy(ids[start + 1 : start + 1 + rows]).to(logits.device)
        chosen = logits.gather(1, wanted[:, None])[:, 0]
        losses += (torch.logsumexp(logits, dim=1) - chosen).tolist()
    return losses


def _step(ids: "np.ndarray", start: int, block_size: int) -> "StepBatch":
    """A chunk of a text, whose first tokens were run before."""
    import numpy as np

    from .engine.batch import SequenceSlice, StepBatch

    length = len(ids)
    stop = min(start + ROWS, length)
    part = SequenceSlice(
        query_start=0,
        query_length=stop - start,
        context_length=stop,
        block_table=tuple(range(-(-stop // block_size))),
        prompt_length=length,
    )
    # The last token foretells nothing that is there.
    rows = min(stop, length - 1) - start
    return StepBatch(
        token_ids=ids[start:stop],
        positions=np.arange(start, stop, dtype=np.int64),
        slices=(part,),
        logit_rows=np.arange(rows, dtype=np.int64),
    )
