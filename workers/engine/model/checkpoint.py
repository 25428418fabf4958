"""Reads safetensors into a model tensor by tensor, each in memory once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from ....shared.errors import EngineError, ModelLoadError
from .placing import Placed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .cache import Progress

log = structlog.get_logger("tokenmill.model")

_NOT_WEIGHTS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Tensors of old checkpoints that the code computes by itself."""
_NAMED_IN_MESSAGE = 5
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


def shard_files(directory: Path) -> list[Path]:
    """Returns a checkpoint's safetensors files, those of its index if it has one.

    Raises:
        ModelLoadError: There are none, or the index names one that is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{index} is not a weight index: {error}") from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{directory} lacks {', '.join(missing[:_NAMED_IN_MESSAGE])} which its "
                "index names; fetch the checkpoint again"
            )
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{directory} has no *.safetensors files")
    _check_numbers(directory, files)
    return files


def _check_numbers(directory: Path, files: list[Path]) -> None:
    """Refuses part of a checkpoint whose files are numbered but have no index."""
    found = [match for file in files if (match := _NUMBERED.search(file.name))]
    numbers = {int(match[1]) for match in found}
    expected = max((int(match[2]) for match in found), default=0)
    missing = sorted(set(range(1, expected + 1)) - numbers)
    if missing:
        shown = ", ".join(map(str, missing[:_NAMED_IN_MESSAGE]))
        raise ModelLoadError(
            f"{directory} lacks file {shown} of the {expected} that hold its weights; "
            "fetch the checkpoint again"
        )


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
    """

    def __init__(
        self,
        model: PreTrainedModel,
        placed: dict[str, Placed],
        dtype: torch.dtype,
        *,
        copy: bool,
    ) -> None:
        self._model = model
        self._placed = placed
        self._dtype = dtype
        self._copy = copy
        self._prefix = model.base_model_prefix + "."
        self._wanted = set(dict(model.named_parameters()))
        self._wanted |= {f"{name}.weight" for name in placed}
        self._biases = {f"{name}.bias" for name in placed}
        self._filled: set[str] = set()
        self._unused: list[str] = []

    def read(self, directory: Path, progress: Progress) -> None:
        """Reads all shards.

        Args:
            directory: The checkpoint.
            progress: Told the fraction of tensors that are in place.

        Raises:
            ModelLoadError: A tensor is missing or has another shape.
        """
        head = self._tied_head()
        for name, tensor in iterate(directory):
            target = self._resolve(name)
            if target is None:
                self._unused.append(name)
                continue
            self._place(target, tensor)
            if head is not None and target == head[0] and head[1] not in self._filled:
                self._place(head[1], tensor)
            progress("loading weights", len(self._filled) / len(self._wanted))
        if self._unused:
            log.info(
                "weights_unused",
                count=len(self._unused),
                names=self._unused[:_NAMED_IN_MESSAGE],
            )
        self._check_complete(directory)

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
        if name.endswith(_NOT_WEIGHTS):
            return None
        stripped = name.removeprefix(self._prefix)
        for candidate in (name, self._prefix + name, stripped):
            if candidate in self._wanted or candidate in self._biases:
                return candidate
        return None

    def _place(self, target: str, tensor: torch.Tensor) -> None:
        owner, _, leaf = target.rpartition(".")
        placed = self._placed.get(owner)
        if placed is None:
            self._place_plain(target, tensor)
        elif leaf == "bias":
            placed.slot.fill_bias(tensor)
        else:
            weight = tensor.T if placed.transposed else tensor
            expected = (placed.slot.out_features, placed.slot.in_features)
            if tuple(weight.shape) != expected:
                raise ModelLoadError(_shape_message(target, weight.shape, expected))
            try:
                placed.slot.fill(weight)
            except EngineError as error:
                raise ModelLoadError(f"weight {target}: {error}") from error
        self._filled.add(target)

    def _place_plain(self, target: str, tensor: torch.Tensor) -> None:
        from accelerate.utils import set_module_tensor_to_device

        expected = tuple(self._model.get_parameter(target).shape)
        if tuple(tensor.shape) != expected:
            raise ModelLoadError(_shape_message(target, tensor.shape, expected))
        value = tensor.to(self._dtype, copy=self._copy)
        set_module_tensor_to_device(
            self._model, target, "cpu", value=value, dtype=self._dtype
        )

    def _check_complete(self, directory: Path) -> None:
        missing = sorted(self._wanted - self._filled)
        head = self._tied_head()
        if head is not None and head[1] in missing and head[1] not in self._placed:
            missing.remove(head[1])
        if missing:
            shown = ", ".join(missing[:_NAMED_IN_MESSAGE])
            raise ModelLoadError(
                f"{directory} lacks {len(missing)} weights that its configuration "
                f"calls for ({shown}); fetch the checkpoint again"
            )


def _shape_message(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return (
        f"weight {name} has shape {list(found)}, but config.json calls for "
        f"{list(expected)}; the two are not from the same checkpoint"
    )
