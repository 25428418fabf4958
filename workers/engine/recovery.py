"""What goes wrong in a step: memory runs out, the model raises, an output breaks."""

from typing import TYPE_CHECKING

import msgspec
import structlog

from ...shared.errors import EngineError
from .batch import ModelRunner
from .device_errors import is_device_lost
from .planner import (
    Plan,
    PlannedSlice,
    cut,
    halve,
    left_first,
    left_parts_first,
    num_tokens,
    pack,
)
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


class Ran(msgspec.Struct, frozen=True):
    """What came of a plan."""

    plan: Plan
    """What ran; what is missing of the plan is left for the next step."""
    logits: "torch.Tensor | None"
    """Of `plan`; None when nothing ran."""
    failed: tuple[tuple[Sequence, EngineError], ...] = ()
    """Sequences whose requests end, each by a fault of its own."""


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
        self._accused: set[Sequence] = set()
        """Were in steps for which the model raised, and have not run since."""
        self._acquitted = False
        """Whether others of those steps have run since."""
        self.halvings = 0
        """Times memory ran out."""

    def order(self, running: list[Sequence]) -> list[Sequence]:
        """Returns running sequences with those first that the last step left out.

        Who is gone is neither accused nor proof of others' guilt any more.
        """
        if self._accused:
            self._accused.intersection_update(running)
            self._acquitted = self._acquitted and bool(self._accused)
        return left_first(running, self._left) if self._left else running

    def apply(self, plan: Plan) -> Plan:
        """Returns as much of a plan as the limit allows."""
        left, self._left = self._left, []
        if self._tokens is None:
            return plan
        plan = left_parts_first(plan, left)
        kept = cut(plan, self._tokens)
        self._leave_out(plan[len(kept) :])
        return kept

    def _leave_out(self, parts: Plan) -> None:
        self._left = [*(part.sequence for part in parts), *self._left]

    def run(self, plan: Plan) -> Ran:
        """Runs a plan, or what of it can run.

        When memory runs out, its first half is tried, and so on. When the model raises
        anything else, halves find the slice that makes it raise: its request ends if
        others run without it.

        Args:
            plan: At least one slice.

        Raises:
            Exception: Whatever the model raised, if it raises for every slice: then it
                is not a request that is at fault.
        """
        whole = plan
        suspects: list[tuple[PlannedSlice, Exception]] = []
        while True:
            result = self._attempt(plan)
            if not isinstance(result, Exception):
                self._ran(_without(whole, suspects), plan)
                return Ran(plan, result, self._convict(suspects))
            if is_device_lost(result):
                raise result  # no half of the step would fare better
            if is_out_of_memory(result):
                self._ran_out(plan, result)
                if num_tokens(plan) == 1:
                    return Ran((), None, (_too_large(plan[0], result),))
                plan = halve(plan)
            elif len(plan) > 1:
                plan = self._narrowed(plan)
            else:
                suspects.append((plan[0], result))
                plan = _without(whole, suspects)
                if not plan and not self._is_guilty(suspects):
                    raise result
                if not plan:
                    return Ran((), None, self._convict(suspects))

    def _attempt(self, plan: Plan) -> "torch.Tensor | Exception":
        """Returns the logits of a plan, or what the model raised."""
        try:
            return self._runner.run(pack(plan))
        except Exception as error:  # noqa: BLE001 - `run` decides what becomes of it
            return error

    def _narrowed(self, plan: Plan) -> Plan:
        """Returns the part of a plan to try after the whole made the model raise."""
        known = tuple(part for part in plan if part.sequence in self._accused)
        if 0 < len(known) < len(plan):
            return known
        if not self._accused:
            self._acquitted = False
        self._accused.update(part.sequence for part in plan)
        return halve(plan)

    def _is_guilty(self, suspects: "list[tuple[PlannedSlice, Exception]]") -> bool:
        """Whether the last ones of a step that raised are those that made it raise."""
        accused = all(part.sequence in self._accused for part, _ in suspects)
        return accused and self._acquitted

    def _convict(
        self, suspects: "list[tuple[PlannedSlice, Exception]]"
    ) -> tuple[tuple[Sequence, EngineError], ...]:
        self._accused.difference_update(part.sequence for part, _ in suspects)
        return tuple(map(_convicted, suspects))

    def _ran_out(self, plan: Plan, error: Exception) -> None:
        self.halvings += 1
        tokens = num_tokens(plan)
        _log.warning(
            "step_out_of_memory", tokens=tokens, slices=len(plan), error=str(error)
        )
        self._largest = max(self._largest, tokens)
        self._tokens = max(1, tokens // 2)
        # Its frames hold the failed step's tensors, which could not be given back.
        error.__traceback__ = None
        release = getattr(self._runner, "release_caches", None)
        if release is not None:
            release()

    def _ran(self, whole: Plan, ran: Plan) -> None:
        came = {part.sequence for part in ran}
        self._leave_out(tuple(part for part in whole if part.sequence not in came))
        if self._accused:
            acquitted = self._accused & came
            self._accused -= acquitted
            self._acquitted = self._acquitted or bool(acquitted)
        if self._tokens is None:
            return
        tokens = num_tokens(ran)
        if len(ran) < len(whole) or tokens < num_tokens(whole):
            self._tokens = tokens
        elif tokens >= self._tokens:
            self._tokens += max(1, self._tokens // 16)
            if self._tokens > self._largest:
                _log.info("step_size_restored", tokens=self._tokens)
                self._tokens, self._largest = None, 0


def _too_large(part: PlannedSlice, error: Exception) -> tuple[Sequence, EngineError]:
    """Ends the request whose single token does not fit."""
    return part.sequence, EngineError(
        f"a step of 1 token with a context of {part.end} tokens ran out of memory, "
        f"alone: {error}; give the worker more memory or a smaller KV pool"
    )


def _without(plan: Plan, suspects: "list[tuple[PlannedSlice, Exception]]") -> Plan:
    """Returns a plan without the slices that made the model raise by themselves."""
    if not suspects:
        return plan
    alone = [suspect for suspect, _ in suspects]
    return tuple(part for part in plan if part not in alone)


def _convicted(
    suspect: "tuple[PlannedSlice, Exception]",
) -> tuple[Sequence, EngineError]:
    """Logs, with its traceback, what a request did to the model; ends the request."""
    part, error = suspect
    sequence = part.sequence
    _log.error(
        "request_made_model_raise", request_id=sequence.request.id, exc_info=error
    )
    return sequence, EngineError(
        f"the model raised for this request and not for others: {error!r}"
    )
