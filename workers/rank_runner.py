"""The runner of a group, whose first failed step is its last."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from .bridge import EXIT_STUCK
from .engine.parallel.runner import LeadingRunner

if TYPE_CHECKING:
    import torch

    from .engine.batch import StepBatch
    from .engine.model.runner import TransformersRunner
    from .engine.parallel.communicator import Communicator


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
        fail: Callable[[str], None],
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
            return super().run(batch)
        except Exception as error:
            self._fail(f"a step of the group failed: {type(error).__name__}: {error}")
            raise SystemExit(EXIT_STUCK) from error
