"""Reads safetensors into a model tensor by tensor, each in memory once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ....shared.errors import EngineError, ModelLoadError
from .calibration.folding import Fold
from .headers import read_headers, shard_files
from .mapping import mapped_tensors
from .matching import TensorMatcher, tied_head
from .placing import Placed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..parallel.sharding import Sharding
    from .cache import Progress


def iterate(
    directory: Path, *, sampled: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) over all shards; a tensor is read when it is looked at.

    Args:
        directory: The checkpoint.
        sampled: A few values of each are wanted: the system reads nothing ahead.
    """
    for file in shard_files(directory):
        yield from mapped_tensors(file, sampled=sampled)


class CheckpointReader:
    """Puts a checkpoint's tensors where they belong in a model on the meta device.

    Args:
        model: Its parameters are on the meta device, except those already placed.
        placed: Linear slots by name, from `place_linears`.
        dtype: Of every parameter that is not in a slot.
        copy: Copy those parameters; else they stay views of the mapped file, which
            keeps all of it mapped.
        home: The device of a parameter that is not in a slot, by its name.
        folds: Factors on tensors, by the model's names.
        sharding: The rank's part of the model; None reads all of it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        placed: dict[str, Placed],
        dtype: torch.dtype,
        *,
        copy: bool,
        home: Callable[[str], torch.device | str] = lambda _name: "cpu",
        folds: Mapping[str, Fold] | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self._model = model
        self._placed = placed
        self._dtype = dtype
        self._copy = copy
        self._home = home
        self._folds = folds or {}
        self._sharding = sharding
        wanted = set(dict(model.named_parameters()))
        wanted |= {f"{name}.weight" for name in placed}
        wanted |= {f"{name}.bias" for name, one in placed.items() if one.bias}
        shapes = {name: self._shape_of(name) for name in wanted}
        self._matcher = TensorMatcher(model, shapes)

    def read(self, directory: Path, progress: Progress) -> None:
        """Reads all shards, after their headers were found to be what is wanted.

        Args:
            directory: The checkpoint.
            progress: Told the fraction of tensors that are in place.

        Raises:
            ModelLoadError: A tensor is missing, comes twice, has another shape or
                belongs to a layer that the model does not have.
        """
        stored = read_headers(directory)
        targets = self._matcher.match(directory, stored)
        tied = tied_head(self._model)
        if tied is not None and tied[1] in stored:
            tied = None
        filled = 0
        for name, tensor in self._tensors(directory, targets):
            target = targets.get(name)
            if target is None:
                continue
            try:
                if tied is not None and target == tied[0]:
                    self._place_tied(tied, tensor)
                else:
                    self._place(target, tensor)
            except ModelLoadError as error:
                raise ModelLoadError(f"{stored[name].file}: {error}") from error
            filled += 1
            progress("loading weights", filled / len(targets))

    def _tensors(
        self, directory: Path, targets: Mapping[str, str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields tensors, or the rank's parts of them, by stored name."""
        if self._sharding is None:
            return iterate(directory)
        from ..parallel.reading import iterate_parts

        return iterate_parts(directory, self._sharding.parts(targets))

    def _shape_of(self, target: str) -> tuple[int, ...]:
        """Returns the shape that a parameter has in a checkpoint."""
        whole = None if self._sharding is None else self._sharding.whole_shape(target)
        if whole is not None:
            return whole
        owner, _, leaf = target.rpartition(".")
        placed = self._placed.get(owner)
        if placed is None:
            return tuple(self._model.get_parameter(target).shape)
        slot = placed.slot
        if leaf == "bias":
            return (slot.out_features,)
        if placed.transposed:
            return (slot.in_features, slot.out_features)
        return (slot.out_features, slot.in_features)

    def _place(self, target: str, tensor: torch.Tensor) -> None:
        owner, _, leaf = target.rpartition(".")
        placed = self._placed.get(owner)
        if self._sharding is not None and self._sharding.drops(target):
            tensor = torch.zeros_like(tensor)  # another rank adds it
        if placed is None:
            self._place_plain(target, tensor)
        elif leaf == "bias":
            placed.slot.fill_bias(self._folded(target, tensor))
        else:
            try:
                weight = tensor.T if placed.transposed else tensor
                placed.slot.fill(self._folded(target, weight))
            except EngineError as error:
                raise ModelLoadError(f"weight {target}: {error}") from error

    def _place_tied(self, targets: tuple[str, str], tensor: torch.Tensor) -> None:
        """Fills embedding and head, which keep the same memory unless one is copied."""
        if self._dtype == torch.float32 and not self._copy:
            tensor = tensor.float()  # once for both: widening rounds nothing
        for target in targets:
            self._place(target, tensor)

    def _place_plain(self, target: str, tensor: torch.Tensor) -> None:
        from accelerate.utils import set_module_tensor_to_device

        tensor = self._folded(target, tensor)
        value = tensor.to(self._dtype, copy=self._copy)
        set_module_tensor_to_device(
            self._model, target, self._home(target), value=value, dtype=self._dtype
        )

    def _folded(self, target: str, tensor: torch.Tensor) -> torch.Tensor:
        fold = self._folds.get(target)
        return tensor if fold is None else fold(tensor)
