"""Reads safetensors into a model tensor by tensor, each in memory once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from ....shared.errors import EngineError, ModelLoadError
from .calibration.folding import Fold
from .headers import NOT_WEIGHTS, StoredTensor, read_headers, shard_files
from .placing import Placed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .cache import Progress

log = structlog.get_logger("tokenmill.model")

_NAMED_IN_MESSAGE = 5


def iterate(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) over all shards; a tensor is read when it is yielded."""
    from safetensors import SafetensorError, safe_open

    for file in shard_files(directory):
        try:
            with safe_open(file, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118  (not a mapping)
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(
                f"{file} is damaged ({error}); fetch the checkpoint again"
            ) from error


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
    ) -> None:
        self._model = model
        self._placed = placed
        self._dtype = dtype
        self._copy = copy
        self._home = home
        self._folds = folds or {}
        self._prefix = model.base_model_prefix + "."
        self._wanted = set(dict(model.named_parameters()))
        self._wanted |= {f"{name}.weight" for name in placed}
        self._wanted |= {f"{name}.bias" for name, one in placed.items() if one.bias}

    def read(self, directory: Path, progress: Progress) -> None:
        """Reads all shards, after their headers were found to be what is wanted.

        Args:
            directory: The checkpoint.
            progress: Told the fraction of tensors that are in place.

        Raises:
            ModelLoadError: A tensor is missing, comes twice or has another shape.
        """
        stored = read_headers(directory)
        targets = self._targets(directory, stored)
        head = self._tied_head()
        filled = 0
        for name, tensor in iterate(directory):
            target = targets.get(name)
            if target is None:
                continue
            try:
                self._place(target, tensor)
                if head is not None and target == head[0] and head[1] not in stored:
                    self._place(head[1], tensor)
            except ModelLoadError as error:
                raise ModelLoadError(f"{stored[name].file}: {error}") from error
            filled += 1
            progress("loading weights", filled / len(targets))

    def _targets(
        self, directory: Path, stored: Mapping[str, StoredTensor]
    ) -> dict[str, str]:
        """Returns the parameter for each stored name that has one, all checked."""
        names: dict[str, str] = {}
        unused: list[str] = []
        for name, tensor in stored.items():
            target = self._resolve(name)
            if target is None:
                unused.append(name)
                continue
            if target in names:
                raise ModelLoadError(
                    f"{tensor.file}: tensors {names[target]} and {name} are both "
                    f"{target}; expected each once"
                )
            expected = self._shape_of(target)
            if tensor.shape != expected:
                raise ModelLoadError(
                    f"{tensor.file}: weight {name} has shape {list(tensor.shape)}, but "
                    f"config.json calls for {list(expected)}; the two are not from the "
                    "same checkpoint"
                )
            names[target] = name
        if unused:
            log.info(
                "weights_unused", count=len(unused), names=unused[:_NAMED_IN_MESSAGE]
            )
        self._check_complete(directory, names.keys())
        return {name: target for target, name in names.items()}

    def _shape_of(self, target: str) -> tuple[int, ...]:
        """Returns the shape that a parameter has in a checkpoint."""
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

    def _tied_head(self) -> tuple[str, str] | None:
        """Returns (embedding, head) weight names when one tensor serves both."""
        if not self._model.config.tie_word_embeddings:
            return None
        # The class attribute is how transformers itself declares which are tied.
        names: dict[str, str] = self._model._tied_weights_keys or {}  # noqa: SLF001
        for head, embedding in names.items():
            return embedding, head
        return None

    def _resolve(self, name: str) -> str | None:
        if name.endswith(NOT_WEIGHTS):
            return None
        stripped = name.removeprefix(self._prefix)
        for candidate in (name, self._prefix + name, stripped):
            if candidate in self._wanted:
                return candidate
        return None

    def _place(self, target: str, tensor: torch.Tensor) -> None:
        owner, _, leaf = target.rpartition(".")
        placed = self._placed.get(owner)
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

    def _check_complete(self, directory: Path, found: AbstractSet[str]) -> None:
        missing = sorted(self._wanted - found)
        head = self._tied_head()
        if head is not None and head[1] in missing and head[0] in found:
            missing.remove(head[1])
        if missing:
            shown = ", ".join(missing[:_NAMED_IN_MESSAGE])
            raise ModelLoadError(
                f"{directory} lacks {len(missing)} weights that its configuration "
                f"calls for ({shown}); fetch the checkpoint again"
            )
