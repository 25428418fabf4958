"""Steps that do not fit in memory: run what fits, fail only what never will."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from ...shared.errors import EngineError
from .batch import StepBatch
from .planner import Plan, halve, num_tokens, pack

if TYPE_CHECKING:
    import torch

_log = structlog.get_logger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Says whether an exception means that memory ran out, on CPU or device.

    Args:
        error: What the runner raised. PyTorch names its device error
            OutOfMemoryError; its CPU allocator raises a RuntimeError.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in message
        or "can't allocate memory" in message
        or "not enough memory" in message
    )


def run_what_fits(
    run: Callable[[StepBatch], "torch.Tensor"], plan: Plan
) -> tuple[Plan, "torch.Tensor | EngineError"]:
    """Runs a plan; when memory runs out, its first half, and so on.

    What is left out was never marked as computed, so it stands first in the next step.

    Args:
        run: `ModelRunner.run`.
        plan: At least one slice.

    Returns:
        The part that ran, and its logits; or the one token that does not fit even
        alone, and the error for its request.
    """
    while True:
        try:
            return plan, run(pack(plan))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            tokens = num_tokens(plan)
            if tokens == 1:
                context = plan[0].end
                return plan, EngineError(
                    f"a step of 1 token with a context of {context} tokens ran out of "
                    f"memory, alone: {error}; give the worker more memory or a smaller "
                    "KV pool"
                )
            _log.warning("step_out_of_memory", tokens=tokens, slices=len(plan))
            plan = halve(plan)
