"""What goes wrong in a step: memory runs out, or one output cannot be processed."""

from typing import TYPE_CHECKING

import structlog

from ...shared.errors import EngineError
from .batch import ModelRunner
from .planner import Plan, cut, halve, left_first, num_tokens, pack
from .sequence import Sequence

if TYPE_CHECKING:
    import torch

_log = structlog.get_logger(__name__)


def processing_failed(sequence: Sequence, error: Exception) -> EngineError:
    """Logs, with its traceback, what ends one request, and returns it."""
    _log.error("request_failed", request_id=sequence.request.id, exc_info=error)
    return EngineError(f"the output could not be processed: {error!r}")


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


class StepLimit:
    """How many tokens a step may have: no limit until memory runs out.

    A step that does not fit is halved until it does. The size that fitted bounds the
    next steps and grows by a sixteenth with each one that ran at the bound, so that a
    passing shortage is forgotten and a lasting one is met seldom.

    Args:
        runner: Its `release_caches`, where it has one, is called when memory runs out
            and at no other time.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._tokens: int | None = None
        self._largest = 0
        self._left: list[Sequence] = []
        """Left out of the last step: in front of the next."""
        self.halvings = 0
        """Times memory ran out."""

    def order(self, running: list[Sequence]) -> list[Sequence]:
        """Returns running sequences with those first that the last step left out."""
        return left_first(running, self._left) if self._left else running

    def apply(self, plan: Plan) -> Plan:
        """Returns as much of a plan as the limit allows."""
        self._left = []
        if self._tokens is None:
            return plan
        kept = cut(plan, self._tokens)
        self._leave_out(plan[len(kept) :])
        return kept

    def _leave_out(self, parts: Plan) -> None:
        self._left = [*(part.sequence for part in parts), *self._left]

    def run(self, plan: Plan) -> "tuple[Plan, torch.Tensor | EngineError]":
        """Runs a plan; when memory runs out, its first half, and so on.

        Args:
            plan: At least one slice.

        Returns:
            The part that ran, and its logits; or the one token that does not fit even
            alone, and the error for its request.
        """
        whole = plan
        while True:
            try:
                logits = self._runner.run(pack(plan))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._ran_out(plan, error)
                tokens = num_tokens(plan)
                if tokens == 1:
                    return plan, _too_large(plan, error)
                plan = halve(plan)
            else:
                self._ran(whole, plan)
                return plan, logits

    def _ran_out(self, plan: Plan, error: Exception) -> None:
        self.halvings += 1
        tokens = num_tokens(plan)
        _log.warning(
            "step_out_of_memory", tokens=tokens, slices=len(plan), error=str(error)
        )
        self._largest = max(self._largest, tokens)
        self._tokens = max(1, tokens // 2)
        release = getattr(self._runner, "release_caches", None)
        if release is not None:
            release()

    def _ran(self, whole: Plan, ran: Plan) -> None:
        if self._tokens is None:
            return
        self._leave_out(whole[len(ran) :])
        tokens = num_tokens(ran)
        if ran is not whole:
            self._tokens = tokens
        elif tokens >= self._tokens:
            self._tokens += max(1, self._tokens // 16)
            if self._tokens > self._largest:
                _log.info("step_size_restored", tokens=self._tokens)
                self._tokens, self._largest = None, 0


def _too_large(plan: Plan, error: Exception) -> EngineError:
    return EngineError(
        f"a step of 1 token with a context of {plan[0].end} tokens ran out of memory, "
        f"alone: {error}; give the worker more memory or a smaller KV pool"
    )
