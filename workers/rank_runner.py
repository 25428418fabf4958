"""The runner of a group, whose first failed step is its last."""

from typing import TYPE_CHECKING, Protocol

from ..shared.errors import GroupLost
from .bridge import EXIT_STUCK
from .engine.parallel.runner import LeadingRunner

if TYPE_CHECKING:
    import torch

    from .engine.batch import StepBatch
    from .engine.model.runner import TransformersRunner
    from .engine.parallel.communicator import Communicator


class Fail(Protocol):
    """Ends the group."""

    def __call__(self, reason: str, *, misses_another: bool) -> None:
        """Says why; and whether another rank was waited for in vain."""
        ...


class GroupRunner(LeadingRunner):
    """Leads the ranks of a group through each step.

    A step that fails may have left them in the midst of an exchange, so none may
    follow, nor a part of it be tried again as an engine does that runs out of memory.
    Whoever watches the group ends this process, and its jobs go on elsewhere.

    Args:
        runner: Rank 0's shard.
        communicator: Joins the ranks.
        fail: Told why the group cannot go on.
    """

    def __init__(
        self,
        runner: "TransformersRunner",
        communicator: "Communicator",
        fail: Fail,
    ) -> None:
        super().__init__(runner, communicator)
        self.communicator = communicator
        """Counts what the ranks exchange."""
        self._fail = fail

    def run(self, batch: "StepBatch") -> "torch.Tensor":
        """Runs one step on all ranks.

        Args:
            batch: As of `ModelRunner.run`.

        Raises:
            SystemExit: It failed. In a thread this silently ends that thread alone.
        """
        try:
            logits = super().run(batch)
            if logits.is_cuda:
                _settle(logits)
        except Exception as error:
            self._fail(
                f"a step of the group failed: {type(error).__name__}: {error}",
                misses_another=isinstance(error, GroupLost),
            )
            raise SystemExit(EXIT_STUCK) from error
        return logits


def _settle(logits: "torch.Tensor") -> None:
    """Waits for the device: what fails there is raised late, and by whoever asks."""
    import torch

    torch.cuda.current_stream(logits.device).synchronize()
