"""Runs one model on several ranks: rank 0 tells each step's plan, the others follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from ....shared.errors import EngineError
from .plans import decode, encode

if TYPE_CHECKING:
    import torch

    from ..adapters.applying import StepAdapters
    from ..batch import ModelRunner, StepBatch
    from .communicator import Communicator

_STEP: Final = b"s"
_STOP: Final = b"e"
log = structlog.get_logger("tokenmill.parallel")


class LeadingRunner:
    """A `ModelRunner` of which every rank runs a part; the engine sees one runner.

    Any error out of `run` leaves the ranks out of step: the group has to be ended, and
    nothing may be run again.

    Args:
        runner: Rank 0's, from `load_runner`; everything but `run` is its own.
        communicator: Rank 0's end of the group.
    """

    def __init__(self, runner: ModelRunner, communicator: Communicator) -> None:
        if communicator.rank:
            raise EngineError(
                f"rank {communicator.rank} cannot lead; rank 0 does, others `follow`"
            )
        self._runner = runner
        self._communicator = communicator
        self._stopped = False
        self._adapters: StepAdapters | None = None

    @property
    def adapters(self) -> StepAdapters | None:
        """Rank 0's part of the adapters, once it is set."""
        return self._adapters

    @adapters.setter
    def adapters(self, adapters: StepAdapters) -> None:
        self._adapters = adapters
        self._runner.adapters = adapters  # type: ignore[attr-defined]  # see `serving`

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever the runner has)
        return getattr(self._runner, name)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Runs a step on all ranks.

        Args:
            batch: Packed tokens; block tables cover each slice's context.

        Returns:
            float32 [num_rows, vocab_size] on the device of rank 0.

        Raises:
            GroupLost: A rank is gone or did not answer in time.
        """
        self._communicator.broadcast_bytes(_STEP + encode(self._told(batch)))
        return self._runner.run(batch)

    def _told(self, batch: StepBatch) -> StepBatch:
        """Returns a step as the other ranks are told it: adapters by their tickets."""
        if not batch.adapters:
            return batch
        if self._adapters is None:
            raise EngineError("a step has adapters, and this group serves none")
        tickets = self._adapters.tickets(batch)
        return msgspec.structs.replace(batch, adapters=tickets)

    def close(self) -> None:
        """Tells the followers to end; safe to call again and after a loss."""
        if self._stopped:
            return
        self._stopped = True
        try:
            self._communicator.broadcast_bytes(_STOP)
        except EngineError as error:
            log.info("followers_not_told", reason=str(error))


def follow(runner: ModelRunner, communicator: Communicator) -> None:
    """Runs what rank 0 tells, until it says that it ends.

    Args:
        runner: This rank's, from `load_runner`.
        communicator: This rank's end of the group.

    Raises:
        GroupLost: Another rank is gone or did not answer in time.
        EngineError: Rank 0 said something that this version does not know.
    """
    while True:
        message = communicator.broadcast_bytes()
        kind, plan = message[:1], message[1:]
        if kind == _STOP:
            return
        if kind != _STEP:
            raise EngineError(
                f"rank 0 sent a message of unknown kind {kind!r}; every rank of a "
                "group has to run the same version"
            )
        runner.run(decode(plan))
