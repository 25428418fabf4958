"""Adds the adapters of a step's rows to the outputs of the model's linear layers.

The layers get forward hooks for the length of such a step and have none in all others,
which so cost what they cost before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from ....shared.errors import EngineError

if TYPE_CHECKING:
    from ..batch import StepBatch
    from .delta import Delta
    from .sites import AdaptedModel
    from .source import HeldAdapters

_Hook = Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a step that share an adapter."""

    key: str
    rows: torch.Tensor | None
    """int64, rising; None is all rows of the step."""


def group_rows(batch: StepBatch, device: torch.device) -> tuple[RowGroup, ...]:
    """Returns the rows of each adapter, in the order in which the batch names them.

    Args:
        batch: Its `adapters` name one a slice, or none.
        device: Where the rows' numbers are wanted.

    Raises:
        EngineError: It does not name one a slice.
    """
    if len(batch.adapters) != len(batch.slices):
        raise EngineError(
            f"a step of {len(batch.slices)} slices names {len(batch.adapters)} adapters"
        )
    rows: dict[str, list[np.ndarray]] = {}
    for key, part in zip(batch.adapters, batch.slices, strict=True):
        if key is not None:
            end = part.query_start + part.query_length
            rows.setdefault(key, []).append(np.arange(part.query_start, end))
    groups = []
    for key, pieces in rows.items():
        own = np.concatenate(pieces)
        everything = len(own) == len(batch.token_ids)
        index = None if everything else torch.from_numpy(own).to(device)
        groups.append(RowGroup(key, index))
    return tuple(groups)


class StepAdapters:
    """Runs steps of a model with adapters.

    Args:
        model: The loaded model.
        source: Where its adapters are.
    """

    def __init__(self, model: AdaptedModel, source: HeldAdapters) -> None:
        self._model = model
        self._source = source

    def tickets(self, batch: StepBatch) -> tuple[str | None, ...]:
        """Returns by what the other ranks know each slice's adapter.

        Args:
            batch: A step with adapters.

        Raises:
            AdapterUnavailable: An adapter is not loaded.
        """
        return tuple(
            None if key is None else self._source.get(key).ticket
            for key in batch.adapters
        )

    @contextmanager
    def applied(self, batch: StepBatch) -> Iterator[None]:
        """Has the model add each row's adapter while the `with` block runs the step.

        Args:
            batch: The step.

        Raises:
            EngineError: An adapter is not loaded.
        """
        groups = group_rows(batch, self._model.target.device)
        wanted: dict[str, list[tuple[Delta, torch.Tensor | None]]] = {}
        for group in groups:
            for site, delta in self._source.get(group.key).deltas.items():
                wanted.setdefault(site, []).append((delta, group.rows))
        state = self._model.state
        with ExitStack() as stack:
            for name, deltas in wanted.items():
                module = self._model.sites[name].module
                handle = module.register_forward_hook(_adding(deltas))
                stack.callback(handle.remove)
            state.one_by_one = True
            try:
                yield
            finally:
                state.one_by_one = False


def _adding(deltas: Sequence[tuple[Delta, torch.Tensor | None]]) -> _Hook:
    """Returns what adds its deltas to a module's output."""

    def add(
        _module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        y = output.reshape(-1, output.shape[-1])
        for delta, rows in deltas:
            if rows is None:
                y += delta(x).to(y.dtype)
            else:
                y.index_add_(0, rows, delta(x.index_select(0, rows)).to(y.dtype))
        return y.view(output.shape)

    return add
