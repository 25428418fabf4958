"""The layers of a rank's model at which ranks meet: two sums a layer, and both ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from .shard import Range

if TYPE_CHECKING:
    from .communicator import Communicator


class SummedLinear(nn.Module):
    """A linear layer of which each rank has some inputs: outputs are summed over ranks.

    One rank alone adds the bias, so that it is in the sum once.

    Args:
        inner: The rank's part.
        communicator: The rank's end of its group.
    """

    def __init__(self, inner: nn.Module, communicator: Communicator) -> None:
        super().__init__()
        self.inner = inner
        self._communicator = communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., the rank's inputs] into [..., out_features], summed."""
        return self._communicator.all_reduce(self.inner(x))


def summed_part(linear: nn.Module) -> nn.Module:
    """Returns the rank's own part of a linear layer, which may be all of it."""
    return linear.inner if isinstance(linear, SummedLinear) else linear


class SplitEmbedding(nn.Module):
    """An embedding of which each rank has the rows of some tokens.

    The others give zeros, so that the sum over ranks is exact.

    Args:
        inner: Looks up the rank's rows.
        tokens: The token ids that they belong to.
        communicator: The rank's end of its group.
    """

    def __init__(
        self, inner: nn.Module, tokens: Range, communicator: Communicator
    ) -> None:
        super().__init__()
        self.inner = inner
        self._first, self._stop = tokens
        self._communicator = communicator

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns [..., hidden] for int64 token ids [...], on every rank."""
        elsewhere = (token_ids < self._first) | (token_ids >= self._stop)
        own = (token_ids - self._first).masked_fill(elsewhere, 0)
        rows: torch.Tensor = self.inner(own)
        return self._communicator.all_reduce(
            rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        )


class GatheredHead(nn.Module):
    """An output head of which each rank has the rows of some tokens.

    Args:
        inner: Gives the rank's logits.
        widths: Tokens of each rank.
        communicator: The rank's end of its group.
    """

    def __init__(
        self, inner: nn.Module, widths: tuple[int, ...], communicator: Communicator
    ) -> None:
        super().__init__()
        self.inner = inner
        self._widths = widths
        self._communicator = communicator

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [rows, vocabulary] on rank 0, of no rows on others."""
        logits = self._communicator.gather(self.inner(hidden), self._widths)
        if logits is not None:
            return logits
        return hidden.new_empty((0, sum(self._widths)))
