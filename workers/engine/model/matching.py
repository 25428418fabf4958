"""Matches the tensors of a checkpoint with the parameters that a model calls for.

Only names and shapes are looked at, so that a worker finds what is wrong before it
reads weights, and `tokenmill inspect` finds the same without reading any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from ....shared.errors import ModelLoadError
from .headers import INDEX, NOT_WEIGHTS, StoredTensor, shard_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = structlog.get_logger("tokenmill.model")

_NAMED_IN_MESSAGE: Final = 5
_NUMBERED: Final = re.compile(r"(.+?)\.(\d+)\.")
"""What stands before a layer's number, and the number."""


def tied_head(model: PreTrainedModel) -> tuple[str, str] | None:
    """Returns (embedding, head) weight names when one tensor serves both.

    Args:
        model: Of transformers.
    """
    if not model.config.tie_word_embeddings:
        return None
    # The class attribute is how transformers itself declares which are tied.
    names: dict[str, str] = model._tied_weights_keys or {}  # noqa: SLF001
    for head, embedding in names.items():
        return embedding, head
    return None


class TensorMatcher:
    """Finds the parameter of each stored tensor.

    Args:
        model: Tells prefix, tied weights and what it knows to be unused.
        wanted: Shape of every parameter in a checkpoint, by the model's name.
    """

    def __init__(
        self, model: PreTrainedModel, wanted: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._wanted = wanted
        self._prefix = model.base_model_prefix + "."
        self._head = tied_head(model)
        expected = model._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001
        self._unused = [re.compile(pattern) for pattern in expected]
        self._layers: dict[str, int] = {}
        """How many layers there are, by what stands before their number."""
        for name in wanted:
            if found := _NUMBERED.match(name):
                count = max(self._layers.get(found[1], 0), int(found[2]) + 1)
                self._layers[found[1]] = count

    def match(
        self, directory: Path, stored: Mapping[str, StoredTensor]
    ) -> dict[str, str]:
        """Returns the parameter for each stored name that has one.

        Args:
            directory: The checkpoint.
            stored: From `read_headers`.

        Raises:
            ModelLoadError: A tensor is missing, comes twice, has another shape or
                belongs to a layer that the configuration does not have.
        """
        names: dict[str, str] = {}
        unused: list[str] = []
        for name, tensor in stored.items():
            target = self._resolve(name)
            if target is None:
                self._check_layer(name, tensor)
                if not self._is_known_to_be_unused(name):
                    unused.append(name)
                continue
            if target in names:
                raise ModelLoadError(
                    f"{tensor.file}: tensors {names[target]} and {name} are both "
                    f"{target}; expected each once"
                )
            self._check_shape(target, name, tensor)
            names[target] = name
        if unused:
            shown = unused[:_NAMED_IN_MESSAGE]
            log.warning(
                "weights_unused",
                path=str(directory),
                count=len(unused),
                names=shown,
                reason="config.json calls for no such tensors; they change nothing",
            )
        self._check_complete(directory, names)
        return {name: target for target, name in names.items()}

    def _candidates(self, name: str) -> Iterator[str]:
        yield name
        yield self._prefix + name
        yield name.removeprefix(self._prefix)

    def _resolve(self, name: str) -> str | None:
        if name.endswith(NOT_WEIGHTS):
            return None
        return next(
            (one for one in self._candidates(name) if one in self._wanted), None
        )

    def _is_known_to_be_unused(self, name: str) -> bool:
        if name.endswith(NOT_WEIGHTS) or (self._head and name == self._head[1]):
            return True
        return any(pattern.search(name) for pattern in self._unused)

    def _check_layer(self, name: str, tensor: StoredTensor) -> None:
        """Refuses a tensor of a layer beyond the configuration's number."""
        for candidate in self._candidates(name):
            found = _NUMBERED.match(candidate)
            count = self._layers.get(found[1]) if found else None
            if found is None or count is None or int(found[2]) < count:
                continue
            if any(pattern.search(name) for pattern in self._unused):
                continue
            raise ModelLoadError(
                f"{tensor.file}: tensor {name} is of layer {found[2]}, but config.json "
                f"calls for {_count(count, 'layer')}; the two are not from the same "
                "checkpoint"
            )

    def _check_shape(self, target: str, name: str, tensor: StoredTensor) -> None:
        expected = self._wanted[target]
        if tensor.shape != expected:
            raise ModelLoadError(
                f"{tensor.file}: weight {name} has shape {list(tensor.shape)}, but "
                f"config.json calls for {list(expected)}; the two are not from the "
                "same checkpoint"
            )

    def _check_complete(self, directory: Path, found: Mapping[str, str]) -> None:
        missing = sorted(self._wanted.keys() - found.keys())
        head = self._head
        if head is not None and head[1] in missing and head[0] in found:
            missing.remove(head[1])
        if missing:
            shown = ", ".join(missing[:_NAMED_IN_MESSAGE])
            raise ModelLoadError(
                f"{_place(directory)} lacks {_count(len(missing), 'weight')} "
                f"that config.json calls for ({shown}); fetch the checkpoint again"
            )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _place(directory: Path) -> str:
    """Names what should list a missing tensor: the index, else the file or files."""
    index = directory / INDEX
    if index.is_file():
        return str(index)
    first, *more = shard_files(directory)
    return f"{first} (with {len(more)} more files)" if more else str(first)
