"""Runs one model on several ranks: rank 0 tells each step's plan, the others follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import structlog

from ....shared.errors import EngineError
from .plans import decode, encode

if TYPE_CHECKING:
    import torch

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
        self._communicator.broadcast_bytes(_STEP + encode(batch))
        return self._runner.run(batch)

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
